"""`mlx-paged serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from mlx_paged.cli.arguments import API_KEY_VARIABLE, INSTALL_SERVER, pool_options
from mlx_paged.cli.manners import UsageError


def run(args: argparse.Namespace) -> int:
    try:
        from mlx_paged.server.serve import ServeOptions, serve
    except ImportError as error:
        raise ValueError(
            f"the server needs {error.name}, which is not installed: {INSTALL_SERVER}"
        ) from error
    from mlx_paged.server.api.hosts import LOOPBACK
    from mlx_paged.server.api.settings import ServerSettings
    from mlx_paged.server.messages import Start

    if args.max_num_seqs > (args.max_num_batched_tokens or args.max_num_seqs):
        raise UsageError(
            f"--max-num-seqs {args.max_num_seqs} is more than --max-num-batched-tokens "
            f"{args.max_num_batched_tokens}, and each sequence takes a token of every step"
        )
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
    is_private = args.host in ("localhost", "127.0.0.1", "::1")
    settings = ServerSettings(
        model_name=args.served_model_name or args.model,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        max_body_nbytes=round(args.max_body * 2**20),
        request_timeout=args.request_timeout or None,
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=(*LOOPBACK, *args.allowed_host) if is_private else tuple(args.allowed_host),
    )
    serve(
        ServeOptions(
            Start(args.model, args.dtype, _engine_options(args)),
            settings,
            host=args.host,
            port=args.port,
            max_waiting=args.max_waiting,
            shutdown_timeout=args.shutdown_timeout,
            access_log=not args.no_access_log,
        )
    )
    return 0


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `EngineOptions`, by name."""
    return {
        **pool_options(args),
        "prefix_caching": args.prefix_caching,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "policy": args.policy,
        "preemption": args.preemption,
    }
