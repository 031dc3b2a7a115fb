"""Checks of a model on several nodes: what it takes, and what it is not combined with."""

from __future__ import annotations

from tgi_cli.config.schema import ServeConfig
from tgi_cli.errors import ConfigError


def check_nodes(serve: ServeConfig) -> None:
    """Refuse settings of nodes that contradict others.

    Raises:
        ConfigError: names the flags.
    """
    nodes, rank = serve.nnodes, serve.node_rank
    if nodes == 1:
        for flag, given in (
            (f"--node-rank {rank}", rank > 0),
            ("--node-secret-file", serve.node_secret_file is not None),
        ):
            if given:
                raise ConfigError(f"{flag} is for several nodes", "give --nnodes, or leave it off")
        return
    if rank >= nodes:
        raise ConfigError(
            f"--node-rank {rank} with --nnodes {nodes}: nodes are numbered from 0 to {nodes - 1}",
            "change one of them",
        )
    if serve.node_secret_file is None:
        raise ConfigError(
            f"--nnodes {nodes} needs a secret by which the nodes authenticate each other",
            "write one to a file of yours on each node (openssl rand -hex 32), and give "
            "--node-secret-file",
        )
    if not serve.master_port:
        raise ConfigError("--master-port 0: the other nodes have to know it", "name a port")
    refused = {
        "--lora-adapters": bool(serve.lora_adapters),
        f"--max-loras {serve.max_loras}": bool(serve.max_loras),
        "--speculative-model": serve.speculative_model is not None,
        "--speculative-config": serve.speculative_config is not None,
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(
                f"{flag} is not supported with --nnodes {nodes}", "leave one of them off"
            )
    if serve.num_shard is not None:
        check_division(nodes, serve.num_shard, serve.pipeline_parallel_size)


def check_division(nodes: int, num_shard: int, stages: int) -> None:
    """Check that each node gets as many processes as the others.

    Raises:
        ConfigError: it does not.
    """
    processes = num_shard * stages
    if processes % nodes:
        what = "1 process" if processes == 1 else f"{processes} processes"
        raise ConfigError(
            f"{what} cannot be divided evenly among --nnodes {nodes}",
            "choose --pipeline-parallel-size and --num-shard so that their product is a multiple",
        )
