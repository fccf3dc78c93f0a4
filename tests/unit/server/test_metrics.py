"""The exposition text, and the dashboard and alerts that are written against it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from specdec_tap.capture.status import StatusReader, of_server
from specdec_tap.vllm_plugin.metrics import TapCollector, exposition, families

GRAFANA = Path(__file__).parents[3] / "configs" / "grafana"
OPERATING = Path(__file__).parents[3] / "docs" / "operating.md"


@pytest.fixture
def text(tmp_path, put_status):
    for rank in range(2):
        put_status(f"r{rank}", dp_rank=rank, server_id="x", sample_rate=0.5, min_free_bytes=1000,
                   worker={"requests_started": 10 + rank, "hook_ns": 5 * 10**8, "dropped_ring_full": rank},
                   writer={"tokens": 100, "response_tokens": 60, "dropped_ring_full": 1})  # fmt: skip
    statuses = of_server(StatusReader(tmp_path / "shards").read(), "x")
    return exposition(lambda: statuses).decode()


def samples_of(text: str) -> dict[tuple, float]:
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_every_rank_has_its_own_series(text):
    samples = samples_of(text)
    started = [samples["specdec_tap_requests_started_total", ("engine", str(r))] for r in range(2)]
    assert started == [10, 11]
    assert samples["specdec_tap_hook_seconds_total", ("engine", "0")] == 0.5
    assert samples["specdec_tap_tokens_total", ("engine", "1"), ("kind", "prompt")] == 40
    dropped = samples["specdec_tap_requests_dropped_total", ("engine", "1"), ("reason", "ring_full")]
    assert dropped == 2
    assert samples["specdec_tap_state", ("engine", "0"), ("state", "capturing")] == 1
    assert samples["specdec_tap_state", ("engine", "0"), ("state", "off")] == 0


def test_names_units_and_help_are_what_prometheus_expects(text):
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith((".", "in seconds.", "in bytes."))
        assert re.fullmatch(r"specdec_tap_[a-z_]+", family.name)
        for sample in family.samples:
            assert sample.name == family.name + ("_total" if family.type == "counter" else "")
            assert "engine" in sample.labels
        assert not family.name.endswith(("_ms", "_kb", "_count"))


def test_without_a_capture_there_is_no_sample_and_no_error():
    assert exposition(list).decode() == ""

    def gone():
        raise OSError("no folder")

    assert list(TapCollector(gone).collect()) == []


def known_names() -> set[str]:
    return {f.name + ("_total" if f.type == "counter" else "") for f in families([])}


def used_names(expression: str) -> set[str]:
    return set(re.findall(r"\bspecdec_tap_[a-z_]+", expression))


def test_dashboard_and_alerts_use_only_metrics_that_exist(text):
    dashboard = json.loads((GRAFANA / "specdec-tap.json").read_text())
    expressions = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    expressions += [
        v["query"]["query"] for v in dashboard["templating"]["list"] if isinstance(v["query"], dict)
    ]
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    used = set().union(*map(used_names, [*expressions, *(r["expr"] for r in rules)]))
    shown = {name for name, *_ in samples_of(text)}
    assert used
    assert used <= shown
    assert shown <= known_names()
    # Label values in the expressions are ones that exist.
    for expression in [*expressions, *(r["expr"] for r in rules)]:
        for label, value in re.findall(r'\b(state|source)="([a-z]+)"', expression):
            assert f'{label}="{value}"' in text


def test_panels_do_not_overlap():
    panels = json.loads((GRAFANA / "specdec-tap.json").read_text())["panels"]
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_every_alert_and_metric_is_explained():
    page = OPERATING.read_text()
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [r["alert"] for r in rules if f"`{r['alert']}`" not in page] == []
    assert sorted(n for n in known_names() if f"`{n}`" not in page) == []
