"""The dashboard in a real browser: the flows clicked through, at two widths and in both colour schemes.

SHOTS=FOLDER keeps a picture of every page.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import browser as browsers
from helpers.browser import Watched, watched
from helpers.pagekit import make_runs, make_shards, write_traffic
from helpers.serverkit import make_many

from specdec_tap.runlog import LOG_NAME, PREDICTIONS_NAME, Predictions

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(browsers.problem() is not None, reason=str(browsers.problem())),
]

TOKEN = "correct-horse-battery-staple"
RUN = "higher-rate"


@dataclass
class Site:
    url: str
    shards: Path
    runs: Path

    def predicted(self) -> str:
        """The held-out record that the drafter predicts best; it is also wrong often enough."""
        found = Predictions(self.runs / RUN / PREDICTIONS_NAME)
        return max(found.records, key=lambda name: found.get(name).steps[0].correct.count(1))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    """The dashboard with a token: text is hidden until a reader signs in."""
    folder = tmp_path_factory.mktemp("site")
    shards = make_shards(folder / "shards", folder / "model")
    runs = make_runs(folder / "runs", shards)
    write_traffic(shards, 60)
    arguments = (str(shards), "--runs", str(runs))
    with browsers.dashboard(*arguments, env={"SPECDEC_TAP_ADMIN_TOKEN": TOKEN}) as url:
        yield Site(url, shards, runs)


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with browsers.chromium() as one:
        yield one


@pytest.fixture
def wide(chromium, site) -> Iterator[Watched]:
    with watched(chromium, site.url) as one:
        yield one


def sign_in(watch: Watched, after: str = "/") -> None:
    page = watch.go(f"/sign-in?next={after}")
    page.get_by_label("Admin token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Sign out").wait_for()


# ---- every page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_every_page_fits_and_every_control_has_a_name(chromium, site, width, scheme):
    with watched(chromium, site.url, width=width, scheme=scheme) as watch:
        sign_in(watch)
        record = site.predicted()
        pages = {
            "capture": "/", "shards": "/shards", "shard": "/shards/gpu-7-0/1", "records": "/records",
            "sequence": f"/records/{record}?run={RUN}", "runs": "/runs", "run": f"/runs/{RUN}",
            "evaluations": "/evaluations", "sign-in": "/sign-in",
        }  # fmt: skip
        for name, path in pages.items():
            page = watch.go(path)
            if name in ("capture", "runs", "run", "evaluations"):
                page.locator("canvas").first.wait_for()
            assert page.locator("h1").count() == 1
            assert watch.overflow() == [], name
            assert watch.nameless() == [], name
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            dark = sum(int(n) for n in re.findall(r"\d+", background)[:3]) < 3 * 128
            assert dark == (scheme == "dark")
            watch.shot(f"{name}-{width}-{scheme}")


# ---- capture


def test_the_capture_page_moves_by_itself(wide, site):
    write_traffic(site.shards, 60)
    page = wide.go("/")
    page.get_by_text("live", exact=True).wait_for()
    page.locator("#capture-state", has_text="capturing").wait_for()  # until then it may be an old status
    forecast = page.locator("[data-v=forecast]").first
    for seconds in range(61, 90):
        write_traffic(site.shards, seconds)
        page.locator("[data-v='total.num_tokens']", has_text=f"{8_800 * seconds:,}").wait_for()
        if seconds > 63 and "full in" in forecast.inner_text():  # it needs a rate, over some looks
            break
    rates = "[data-v='rates.rows_per_s'], [data-v='rates.tokens_per_s']"
    shown = page.locator(rates).all_inner_texts()  # at once: of one moment
    rows, tokens = (float(text.replace(",", "")) for text in shown)
    assert tokens / rows == pytest.approx(8_800 / 9_000, rel=0.01)
    row = page.locator("#ranks tr[data-stream='gpu-7-1']")
    assert row.locator("[data-r=num_sealed]").inner_text() == f"{39 * seconds:,}"
    assert re.search(r"full in \d", forecast.inner_text())
    assert page.locator("#chart-rows canvas").count() == 1
    page.locator("#chart-rows summary").click()
    assert page.locator("#chart-rows tbody tr").count() >= 2
    wide.shot("capture-live")


def test_a_server_that_goes_silent_is_said(wide, site):
    write_traffic(site.shards, 70)
    page = wide.go("/")
    path = site.shards / "gpu-7-1" / ".status.json"
    data = json.loads(path.read_text())
    data["updated_unix_s"] = time.time() - 60
    path.write_text(json.dumps(data))
    page.locator("#capture-state .badge", has_text="stale").wait_for()
    assert "no news from the writer" in page.locator("#rank-messages").inner_text()
    wide.shot("capture-stale")
    write_traffic(site.shards, 71)
    page.locator("#capture-state .badge", has_text="capturing").wait_for()


# ---- shards and records


def test_a_shard_is_found_and_verified(wide):
    page = wide.go("/")
    page.get_by_role("navigation", name="Sections").get_by_role("link", name="Shards").click()
    rows = page.locator("tbody tr")
    assert rows.count() == 2
    page.get_by_label("Find").fill("000002")
    page.get_by_label("Find").press("Enter")
    page.get_by_role("link", name="All shards").wait_for()
    assert rows.count() == 1
    page.get_by_label("Find").fill("no such shard")
    page.get_by_role("button", name="Search").click()
    page.get_by_text("No shard matches").wait_for()
    wide.shot("shards-nothing")
    page.get_by_role("link", name="All shards").click()
    page.get_by_role("link", name="gpu-7-0/000001").click()
    page.get_by_role("button", name="Verify now").click()
    page.locator("#live-shard section .badge.good", has_text="good").wait_for()
    wide.shot("shard-verified")


def test_a_record_is_found_by_request_id_and_opened(wide):
    page = wide.go("/records")
    page.get_by_label("Find").fill("chatcmpl-0091")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/records?*q=chatcmpl-0091*")
    assert page.locator("tbody tr").count() == 1
    wide.shot("records-found")
    page.locator("tbody a").click()
    page.locator("#tokens").wait_for()
    assert page.locator(".k-gap.t").count() == 12
    assert page.locator(".legend").get_by_text("no states").is_visible()
    page.get_by_role("link", name="Records", exact=True).first.click()
    page.get_by_label("Order").select_option("longest")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/records?*sort=longest*")
    lengths = [int(text) for text in page.locator("tbody td.num:nth-of-type(2)").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True)
    page.get_by_label("only with gaps").check()
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**gaps_only=true*")
    assert page.locator("tbody tr").count() == 1


def test_a_follow_up_shows_what_the_prefix_cache_gave(wide):
    page = wide.go("/records?q=chatcmpl-0090")
    page.locator("tbody a").click()
    page.locator("#tokens").wait_for()
    assert page.locator(".t.k-cached").count() == 64
    assert page.locator(".t.k-earlier").count() > 10
    assert page.locator(".legend").get_by_text("from the prefix cache").is_visible()
    wide.shot("sequence-follow-up")
    source = page.locator(".facts a.mono").first
    name = source.inner_text()
    source.click()
    page.get_by_role("heading", name=name).wait_for()


# ---- text


def test_text_is_hidden_until_the_reader_signs_in_and_then_harmless(wide, site):
    page = wide.go("/records?q=chatcmpl-0024")
    page.locator("tbody a").click()
    page.get_by_text("Text and token ids are hidden").wait_for()
    assert "script ran" not in page.content()
    assert set(page.locator("#tokens").inner_text()) == {"\u00b7"}
    wide.shot("sequence-hidden")
    path = page.url.removeprefix(site.url)
    page.get_by_role("link", name="Sign in", exact=True).first.click()
    page.get_by_label("Admin token").fill("wrong-token-wrong-token")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("That is not the token.").wait_for()
    wide.shot("sign-in-wrong")
    assert [p for p in wide.problems if not p.startswith(("401 ", "console: Failed to load"))] == []
    wide.problems.clear()
    page.get_by_label("Admin token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**{path}")
    shown = page.locator("#tokens").inner_text()
    assert "<script>alert('script ran')</script>" in shown
    assert "onerror=" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[31mred" in shown
    assert page.locator("#tokens script, #tokens img, #tokens b").count() == 0
    wide.shot("sequence-hostile")
    page.get_by_role("button", name="Sign out").click()
    wide.go(path)
    page.get_by_text("Text and token ids are hidden").wait_for()


# ---- where the drafter fails


def test_a_reader_sees_where_the_drafter_fails(wide, site):
    sign_in(wide)
    page = wide.go(f"/records/{site.predicted()}")
    chosen = page.get_by_label("Predicted by")
    assert set(chosen.locator("option").all_inner_texts()) == {"nobody", "first-try", RUN}
    chosen.select_option(RUN)
    page.wait_for_url(f"**run={RUN}*")
    box = page.locator("#tokens")
    found = Predictions(site.runs / RUN / PREDICTIONS_NAME).get(site.predicted())
    right = [step.correct.count(1) for step in found.steps]
    wrong = [step.correct.count(0) for step in found.steps]
    assert min(right) > 0
    assert min(wrong) > 0
    for k in range(3):
        page.get_by_role("radio", name=f"draft {k + 1}").click()
        assert f"mode-{k + 1}" in box.get_attribute("class")
        assert page.locator(f".t.y{k + 1}").count() == right[k]
        assert page.locator(f".t.n{k + 1}").count() == wrong[k]
    assert (
        f"{found.steps[0].correct.count(1) / (right[0] + wrong[0]):.1%}" in page.locator(".bars").inner_html()
    )
    position = found.first_position + found.steps[0].correct.index(0)
    page.locator(f"#t{position}").hover()
    panel = page.locator("#token-panel")
    assert panel.locator("tbody tr").count() == 3
    assert panel.locator("tbody tr").first.inner_text().split("\t")[:2] == ["1", "wrong"]
    page.get_by_role("radio", name="accepted").click()
    assert page.get_by_text("cost a target step", exact=True).is_visible()
    wide.shot("sequence-accepted")
    page.get_by_role("radio", name="draft 1").click()
    wide.shot("sequence-drafts", full=False)
    if page.locator(".misses a").count():
        page.locator(".misses a").first.click()
        page.locator(f"#tokens[aria-activedescendant={page.url.rpartition('#')[2]}]").wait_for()


def test_a_sequence_is_read_with_the_keyboard_alone(wide, site):
    sign_in(wide)
    page = wide.go(f"/records/{site.predicted()}?run={RUN}")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "tokens":
            break
    box = page.locator("#tokens")
    assert box.get_attribute("aria-activedescendant") == "t0"
    page.keyboard.press("ArrowRight")
    assert box.get_attribute("aria-activedescendant") == "t1"
    page.keyboard.press("End")
    last = page.locator(".t").last.get_attribute("id")
    assert box.get_attribute("aria-activedescendant") == last
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    below = page.locator(f"#{box.get_attribute('aria-activedescendant')}")
    assert below.bounding_box()["y"] > page.locator("#t0").bounding_box()["y"]
    page.keyboard.press("Home")
    page.keyboard.press("n")
    miss = page.locator(f"#{box.get_attribute('aria-activedescendant')}")
    assert "n1" in miss.get_attribute("class").split()
    assert "draft 1 wrong" in miss.get_attribute("aria-label")
    outline = miss.evaluate("(n) => getComputedStyle(n).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.dataset.mode") == "1"
    page.keyboard.press("ArrowRight")
    assert "mode-2" in box.get_attribute("class")
    wide.shot("sequence-keyboard", full=False)


# ---- runs and evaluations


def test_runs_are_compared_and_grow(wide, site):
    page = wide.go("/runs")
    page.locator("#chart-loss canvas").wait_for()
    legend = page.locator("#chart-length .u-legend")
    assert {"first-try", RUN} <= set(legend.locator(".u-label").all_inner_texts())
    page.get_by_label("Compare first-try").uncheck()
    page.get_by_role("button", name="Compare the chosen").click()
    page.wait_for_url("**compare=higher-rate*")
    page.locator("#chart-length canvas").wait_for()
    assert "first-try" not in legend.locator(".u-label").all_inner_texts()
    page.get_by_role("link", name=RUN).click()
    page.get_by_role("heading", name=RUN).wait_for()
    page.locator("#chart-loss canvas").wait_for()
    lengths = page.locator("#predicted-title ~ .table-wrap tbody td:last-child").all_inner_texts()
    assert len(lengths) == len(Predictions(site.runs / RUN / PREDICTIONS_NAME))
    assert lengths == sorted(lengths, key=float)
    log = site.runs / RUN / LOG_NAME
    before = log.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    last = next(line for line in reversed(lines) if line["kind"] == "train")
    try:
        page.get_by_text("live", exact=True).wait_for()
        time.sleep(1.5)  # the page has then seen the state that it compares with
        more = [lines[0], last | {"step": last["step"] + 1000}]  # as a resumed run does
        with log.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in more)
        page.locator(".tile .value", has_text=f"{last['step'] + 1000:,}").wait_for()
        assert page.locator("#chart-loss canvas").count() == 1
    finally:
        log.write_text(before)
    wide.shot("run-grown")


def test_evaluations_show_positions_categories_and_speed(wide):
    page = wide.go("/evaluations")
    assert page.locator("#live-evaluations > .table-wrap tbody tr").count() == 3
    page.locator("#chart-speedup canvas").wait_for()
    assert page.locator("#chart-load canvas").count() == 1
    panel = page.locator("section.evaluation", has_text="eval-k3.json")
    assert (
        panel.locator(".bars").get_attribute("aria-label")
        == "Acceptance: position 1 26.2%, position 2 7.2%, position 3 2.3%"
    )
    assert panel.locator("table").first.locator("tbody td:last-child").all_inner_texts() == [
        "1.50\u00d7",
        "1.28\u00d7",
        "1.01\u00d7",
    ]
    assert panel.locator("table").last.locator("tbody th").all_inner_texts() == ["math", "writing"]
    page.locator("#live-evaluations > .table-wrap tbody a", has_text="eval-k3.json").click()
    assert page.url.rpartition("#")[2] == panel.get_attribute("id")


# ---- the frame


def test_a_chosen_colour_scheme_stays(wide):
    page = wide.go("/shards")
    button = page.locator("#theme")
    button.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert button.inner_text() == "Dark"
    wide.go("/")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#chart-rows canvas").count() == 1


def test_pages_that_are_not_there_say_so(chromium, site):
    watch = Watched(chromium, site.url)
    page = watch.go("/records/gpu-7-0/1/999")
    assert "there is no record gpu-7-0/000001/999" in page.get_by_role("alert").inner_text()
    watch.shot("not-found")
    assert [p for p in watch.problems if "404" not in p] == []
    watch.context.close()


def test_a_hundred_thousand_records_are_browsed(chromium, tmp_path):
    """The page holds what is shown, whatever the folder holds: first, last, searched, opened."""
    many = make_many(tmp_path / "many", 100_000)
    with browsers.dashboard(str(many)) as url, watched(chromium, url) as watch:
        page = watch.go("/records")
        assert page.get_by_text("100,000").first.is_visible()
        for path in ("/records", "/records?offset=99950", "/shards", "/shards/s0/1"):
            page = watch.go(path)
            assert page.locator("tbody tr").count() <= 100
            assert page.evaluate("document.getElementsByTagName('*').length") < 3_000
        page = watch.go("/records?sort=newest")
        watch.shot("records-many")
        page.get_by_label("Find").fill("req-099990")
        page.get_by_role("button", name="Show").click()
        page.wait_for_url("**q=req-099990*")
        page.locator("tbody a").first.click()
        page.locator("#tokens").wait_for()


def test_an_empty_folder_says_what_to_do_first(chromium, tmp_path):
    (tmp_path / "empty").mkdir()
    with browsers.dashboard(str(tmp_path / "empty")) as url, watched(chromium, url, width=360) as watch:
        for path, words in (
            ("/", "No server is writing into this folder now."), ("/shards", "holds no shard yet"),
            ("/records", "Nothing is captured yet"), ("/runs", "without a folder of runs"),
            ("/evaluations", "without a folder of runs"),
        ):  # fmt: skip
            page = watch.go(path)
            assert words in page.locator(".empty:visible").first.inner_text()
            assert watch.overflow() == []
            watch.shot(f"empty{path.replace('/', '-')}")
