"""``tgi serve``: a model over HTTP."""

from __future__ import annotations

from pathlib import Path

import typer

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import SERVE


@takes(SERVE)
def serve(given: ParsedSettings) -> None:
    """Serve a model over HTTP: TGI's API and OpenAI's.

    Downloads the model if it is not here yet. Without one, a bundled miniature is served.
    """
    from tgi_cli.cli.local_model import locate
    from tgi_cli.config import ServeConfig
    from tgi_cli.launcher.serve import serve as run
    from tgi_cli.router.config import RouterConfig

    setup.prepare(given, "launcher")
    if given["env"]:
        from tgi_cli.cli.machine import log_machine

        log_machine()
    own = {"model_id": given["model_id"] or "", "hostname": setup.listen_address(given)}
    config = ServeConfig(**given.fields_of(ServeConfig) | own)
    # The launcher fills in the model, the engine's address and the socket.
    own |= {"revision": config.revision or "", "model_path": Path(), "engine_url": ""}
    router = RouterConfig(**given.fields_of(RouterConfig) | setup.front(given) | own)
    raise typer.Exit(run(config, router, locate))
