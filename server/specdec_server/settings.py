"""What the dashboard serves and to whom."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from specdec_tap.config import token_problem
from specdec_tap.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one dashboard."""

    shards_dir: Path
    """Folder that SPECDEC_TAP_DIR named."""

    runs_dir: Path | None = None
    """Folder of training runs, or one run; None: the pages about runs are empty."""

    server_url: str | None = None
    """Address of the ``vllm serve`` whose capture can be paused from the page; None: look, don't touch."""

    host: str = "127.0.0.1"
    """Address that the dashboard listens on."""

    port: int = 8095

    show_text: bool = False
    """True: text and token ids of the requests are shown to everybody who can open the page. False: only
    to a reader who has signed in with the token."""

    token: str | None = field(default=None, repr=False)
    """Secret to sign in with; also sent to ``server_url``. Needed when ``host`` is not loopback."""

    def __post_init__(self) -> None:
        problems = []
        if self.token is not None and (problem := token_problem(self.token)):
            problems.append(problem.replace("admin_token", "SPECDEC_TAP_ADMIN_TOKEN"))
        if not self.loopback and self.token is None:
            problems.append(
                f"--host is {self.host!r}, which other machines can reach, but no token is set; set "
                "SPECDEC_TAP_ADMIN_TOKEN, or keep 127.0.0.1 and use an SSH tunnel"
            )
        if not 0 <= self.port <= 65535:
            problems.append(f"--port is {self.port}; expected 0 to 65535")
        if self.server_url is not None and not self.server_url.startswith(("http://", "https://")):
            problems.append(
                f"--server is {self.server_url!r}; expected an address such as http://127.0.0.1:8000"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the dashboard."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
