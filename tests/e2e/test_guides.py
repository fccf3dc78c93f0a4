"""Guides that need vLLM: every command, in order, with a tiny model in place of the giant.

The commands run as they are written, in a folder that holds a tiny model under the giant's name and a recipe
that was cut down to it; only ports, processes and lengths are changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from helpers.families import make_family
from helpers.guides import GUIDES, commands
from helpers.tiny import make_llama

from specdec_tap import serving
from specdec_tap.cli.demo import wait_until_sealed
from specdec_tap.shards import open_shards

pytestmark = pytest.mark.e2e

REPO = GUIDES.parents[1]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TRITON_BACKENDS_IN_TREE": "1",
}
SBATCH = """#!/bin/bash
# Stands in for Slurm: runs the script's dry run with the variables of --export.
IFS=, read -ra pairs <<< "${1#--export=ALL,}"
SPECDEC_DRY_RUN=1 SLURM_JOB_NUM_NODES=1 env "${pairs[@]}" bash "$2"
"""


class Shell:
    """Runs the commands of a guide in one folder; what serves is kept running in the background."""

    def __init__(self, folder: Path, changes: dict[str, str]) -> None:
        self.folder = folder
        self.port = serving.free_port()
        self.changes = {":8000": f":{self.port}", "--port 8000": f"--port {self.port}", **changes}
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_TAP")} | ENVIRONMENT
        (folder / "bin").mkdir()
        (folder / "bin" / "sbatch").write_text(SBATCH)
        (folder / "bin" / "sbatch").chmod(0o755)
        own = f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}"
        self.env["PATH"] = f"{own}{os.pathsep}{os.environ['PATH']}"
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> str:
        """Run one command and return what it printed; a server is started and waited for."""
        for written, here in self.changes.items():
            command = command.replace(written, here)
        if command.startswith("export "):
            done = self._bash(f"{command}; env -0")
            found = dict(item.split("=", 1) for item in done.split("\0") if "=" in item)
            self.env |= {k: v for k, v in found.items() if k.startswith(("SPECDEC_TAP", "VLLM"))}
            return ""
        words = [word for word in shlex.split(command) if not word.startswith("SPECDEC_TAP_")]
        if words[:2] == ["vllm", "serve"] or (words[1] == "recipe" and words[3] in ("serve", "draft")):
            self.serve(command)
            return ""
        return self._bash(command)

    def _bash(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def serve(self, command: str) -> None:
        self.stop()
        log = self.folder / "serve.log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert self._server.poll() is None, f"{command}\n{log.read_text()[-6000:]}"
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5),
            ):
                return
            time.sleep(0.5)
        raise AssertionError(f"{command}\n{log.read_text()[-6000:]}")

    def stop(self) -> None:
        """Ctrl-C, as the guide says."""
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGINT)
        try:
            self._server.wait(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            raise
        self._server = None


@pytest.fixture
def shell(request, tmp_path):
    made = Shell(tmp_path, getattr(request, "param", {}))
    yield made
    made.stop()


def write_prompts(path: Path, count: int) -> None:
    rows = [{"id": f"p{i}", "turns": [f"Tell me about number {i}.", "And then?"]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tiny_recipe(name: str, folder: Path, port: int) -> None:
    """The recipe of a giant for its tiny namesake: same keys, sizes and ports of here."""
    recipe = yaml.safe_load((REPO / "configs" / "recipes" / name).read_text())
    serve = recipe["serve"]
    for key in ("tensor-parallel-size", "gpu-memory-utilization"):
        del serve[key]
    serve |= {"port": port, "max-model-len": 512, "enforce-eager": True, "dtype": "float32"}
    serve |= {"attention-backend": "CPU_MLA", "max-num-batched-tokens": 512}
    recipe["tap"]["aux_layer_ids"] = [2, 4, 5]
    recipe["train"] |= {
        "draft_vocab_size": 320, "max_length": 512, "batch_tokens": 512, "held_out": 0.1, "max_steps": 10,
        "dtype": "float32",
    }  # fmt: skip
    (folder / "configs" / "recipes").mkdir(parents=True)
    (folder / "configs" / "recipes" / name).write_text(yaml.safe_dump(recipe))
    (folder / "configs" / "slurm").symlink_to(REPO / "configs" / "slurm")


def write_image_settings(folder: Path) -> None:
    """What vLLM reads of a multimodal checkpoint also when images are turned off."""
    settings = {
        "merge_kernel_size": 2, "temporal_merge_kernel_size": 4, "patch_size": 14, "in_patch_limit": 64,
        "patch_limit_on_one_side": 8, "fixed_output_tokens": None, "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": 64, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    processor = {"image_processor_type": "KimiK25VisionProcessor", "media_proc_cfg": settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


KIMI_CHANGES = {"--nproc 8": "--nproc 1", "--max-tokens 1024": "--max-tokens 40", "--limit 40": "--limit 4"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "recipe", "shell"),
    [
        ("kimi-k2", "kimi-k2.yaml", KIMI_CHANGES),
        ("kimi-k2.5", "kimi-k2.5.yaml", {"kimi-k2.yaml": "kimi-k2.5.yaml", **KIMI_CHANGES}),
    ],
    indirect=["shell"],
)
def test_every_command_of_the_kimi_guide(family: str, recipe: str, shell: Shell) -> None:
    name = yaml.safe_load((REPO / "configs" / "recipes" / recipe).read_text())["target"]
    make_family(family, shell.folder / name)
    if family == "kimi-k2.5":
        write_image_settings(shell.folder / name)
    tiny_recipe(recipe, shell.folder, shell.port)
    write_prompts(shell.folder / "prompts.jsonl", 12)
    shards = shell.folder / "shards"
    drafts = 0
    for command in commands("kimi.md"):
        if "shards stats" in command:
            shell.stop()
            wait_until_sealed(shards)
        drafts += " draft " in command
        if " rotate " in command:
            with open_shards(shards, follow=True) as store:
                before = len(store)
            shell.run("specdec-tap replay prompts.jsonl --url http://127.0.0.1:8000/v1 --max-tokens 20")
        said = shell.run(command)
        if "shards verify" in command:
            assert "good" in said
        if " rotate " in command:
            wait_until_sealed(shards)
            with open_shards(shards) as store:
                assert len(store) == before + 12
    assert drafts == 2
    assert json.loads((shell.folder / "eval.json").read_text())["num_drafts"] > 0
    assert (shell.folder / "runs" / "kimi-2" / "drafter" / "model.safetensors").is_file()


EAGER = json.dumps({"enforce_eager": True})


@pytest.mark.matrix
@pytest.mark.parametrize(
    "shell",
    [
        {
            "--max-tokens 512": "--max-tokens 40",
            "--limit 40": "--limit 4",
            "--out runs/1": "--out runs/1 --max-steps 5",
        }
    ],
    indirect=True,
)
def test_every_command_of_the_offline_guide(shell: Shell) -> None:
    """The engine's arguments for a CPU are added to every command that starts one."""
    make_llama(shell.folder / "MODEL", tied=False)
    cpu = "--enforce-eager --dtype bfloat16 --max-model-len 512"
    shell.changes |= {
        "vllm serve MODEL": f"vllm serve MODEL {cpu}",
        "--out shards --resume": f"--out shards --resume --max-length 511 --engine '{EAGER}'",
    }
    write_prompts(shell.folder / "prompts.jsonl", 12)
    chats = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"No {i}"}],
        }
        for i in range(6)
    ]
    (shell.folder / "conversations.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    for command in commands("offline-without-the-model.md"):
        if " extract " in command:
            shell.stop()
            wait_until_sealed(shell.folder / "shards")
        said = shell.run(command)
        if "shards verify" in command:
            assert "good" in said
    with open_shards(shell.folder / "shards") as store:
        assert len(store) == 24 + 6  # both sources lie in one folder
        given = [record for record in store if "given_answers" in record.meta.flags]
    with open_shards(shell.folder / "shards-hf") as store:
        expected = {tuple(record.token_ids.tolist()) for record in store}
    assert {tuple(record.token_ids.tolist()) for record in given} == expected
