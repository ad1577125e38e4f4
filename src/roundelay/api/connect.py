"""Connect this process to the job that its launcher describes."""

from __future__ import annotations

from roundelay.core.settings import common_settings
from roundelay.engine.config import EngineConfig
from roundelay.launch.context import (
    DistributedContext,
    check_backend,
    context_from_env,
    single_process_context,
    under_launcher,
)


def connect(options: EngineConfig, device: str) -> DistributedContext:
    """Return the context of this rank under torchrun, mpirun or srun; without a launcher, that of the only rank.

    Collective under a launcher: blocks until all ranks have called it.
    """
    check_backend(options.backend)
    if not under_launcher():
        return single_process_context(device)
    return context_from_env(
        backend=options.backend,
        bind_address=options.bind_address,
        timeout_s=options.timeout_s,
        failure_s=options.failure_s,
        device=device,
        simulate_nodes=options.simulate_nodes,
        digest=common_settings(options),
    )
