"""vLLM's entry point: ``register()`` runs in every vLLM process and must cost nothing when capture is off.

vLLM swallows an exception while it *loads* a plugin and stops on one inside ``register()``; so this module
imports nothing heavy, and wrong settings raise from ``register()``.
"""

from __future__ import annotations

import os


def register() -> None:
    """Check the settings and arrange for the model runners to be patched when vLLM imports them.

    Safe to call many times. ``--additional-config`` is not known here, so the runners are always patched
    (two attribute lookups per engine step) unless ``SPECDEC_TAP=off``.

    Raises:
        ConfigError: A setting in the environment is wrong.
    """
    from ..capture.status import SERVER_ID_VARIABLE
    from ..config import ADDITIONAL_CONFIG_KEY, ENV_FILE, ENV_PREFIX, ENV_SWITCH, TapConfig

    if os.environ.get(ENV_SWITCH, "").strip().lower() in {"off", "0", "false", "no"}:
        return
    # The folder may come from --additional-config, which is read when the engine starts.
    TapConfig.load(additional_config={ADDITIONAL_CONFIG_KEY: {"dir": "named later"}})
    # Inherited by the processes that this one starts: their status files can be told from another server's.
    os.environ.setdefault(SERVER_ID_VARIABLE, os.urandom(8).hex())
    from .hooks import install

    install()
    if f"{ENV_PREFIX}DIR" in os.environ or ENV_FILE in os.environ:
        config, _ = TapConfig.load()
        if config is not None:
            # Read only where somebody scrapes: in the API server's process.
            from . import metrics

            metrics.register(metrics.FileStatuses(config))
