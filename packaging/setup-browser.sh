#!/usr/bin/env bash
# Find or install the Chromium that the dashboard's tests click through. Never fails: without a browser those
# tests are skipped and say so. CHROMIUM=/path/to/chrome names one that is not on PATH.
#
#   packaging/setup-browser.sh [VENV]
set -u
cd "$(dirname "$0")/.."
venv=${1:-.venv}

found() { "$venv/bin/python" tests/helpers/browser.py; }

if path=$(found); then
    echo "browser: $path"
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "browser: installing Debian's chromium"
    install() { DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
    { install || { timeout 120 apt-get update -qq && install; }; } >/dev/null 2>&1
fi
if ! path=$(found); then
    echo "browser: downloading Playwright's build"
    timeout 120 "$venv/bin/python" -m playwright install chromium >/dev/null 2>&1
fi
if path=$(found); then
    echo "browser: $path"
else
    echo "browser: none could be installed; the dashboard's page tests will be skipped" >&2
fi
exit 0
