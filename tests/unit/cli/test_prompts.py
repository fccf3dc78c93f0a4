"""The prompt generator and the built-in evaluation prompts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter

import pytest

from specdec_tap.evaluate import default_prompt_file, load_prompts
from specdec_tap.prompts import WEIGHTS, iterate_prompts, main, write_prompts
from specdec_tap.replay import check_prompt_file


def take(count: int, seed: int = 0) -> list[dict]:
    return list(itertools.islice(iterate_prompts(seed), count))


def test_five_thousand_prompts_are_distinct_and_of_every_family():
    prompts = take(5000)
    assert len({prompt["turns"][0] for prompt in prompts}) == 5000
    assert len({prompt["id"] for prompt in prompts}) == 5000
    counts = Counter(prompt["category"] for prompt in prompts)
    assert set(counts) == set(WEIGHTS)
    assert min(counts.values()) > 50


def test_prompts_differ_in_their_beginnings():
    """Templates with few slots would give a drafter the same few sentences again and again."""
    beginnings = Counter(" ".join(prompt["turns"][0].split()[:4]).lower() for prompt in take(2000))
    assert len(beginnings) > 600
    assert beginnings.most_common(1)[0][1] < 60


def test_some_conversations_have_several_turns():
    lengths = Counter(len(prompt["turns"]) for prompt in take(2000))
    assert set(lengths) == {1, 2, 3}
    assert 250 < lengths[2] + lengths[3] < 550


def test_no_slot_is_left_open():
    for prompt in take(5000):
        assert not any(c in prompt["turns"][0] for c in "{}"), prompt
        assert prompt["turns"][0] == prompt["turns"][0].strip()


def test_a_seed_gives_the_same_prompts_in_another_process(tmp_path):
    """Python's own string hashing differs from process to process and must not matter."""
    out = tmp_path / "p.jsonl"
    command = [sys.executable, "-m", "specdec_tap.prompts", "--count", "50", "--seed", "7", "--out", str(out)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "123", "PATH": ""})
    assert [json.loads(line) for line in out.read_text().splitlines()] == take(50, seed=7)


def test_seeds_differ():
    first, second = ({p["turns"][0] for p in take(300, seed)} for seed in (0, 1))
    assert len(first & second) < 30


def test_the_written_file_can_be_replayed(tmp_path):
    write_prompts(tmp_path / "p.jsonl", 200)
    found = check_prompt_file(tmp_path / "p.jsonl")
    assert (found.num_conversations, found.num_bad_lines) == (200, 0)


def test_an_unwritable_file_is_named(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "none" / "p.jsonl")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_a_count_below_one_is_refused(tmp_path):
    with pytest.raises(SystemExit) as exit_info:
        main(["--count", "0", "--out", str(tmp_path / "p.jsonl")])
    assert exit_info.value.code == 2


def test_evaluation_prompts_are_many_in_eight_categories_and_not_generated():
    prompts = load_prompts(default_prompt_file())
    categories = Counter(prompt.category for prompt in prompts)
    assert len(prompts) >= 60
    assert len(categories) == 8
    assert min(categories.values()) >= 7
    generated = {prompt["turns"][0].lower() for prompt in take(10_000)}
    assert not generated & {prompt.turns[0].lower() for prompt in prompts}
