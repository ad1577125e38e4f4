"""The competitors of `roundelay.bench.competitors`, and more of torch's own methods:

alone            the engine of Roundelay without communication: each learner is a job of its own
ddp_fp16         torch DDP with the fp16 hook
ddp_accumulate   torch DDP with one all-reduce per 4 batches
periodic         torch PeriodicModelAverager, K = 8
"""

from __future__ import annotations

from contextlib import nullcontext

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from roundelay.bench.competitors import CompetitorRunner, Step
from roundelay.launch.context import single_process_context

OTHERS = ("compute", "ddp", "ddp_fp16", "ddp_accumulate", "periodic")
"""Competitors that do not use the engine."""


class FullRunner(CompetitorRunner):
    """A runner that knows all competitors."""

    def _create_step(self) -> Step:
        if self.entry.name == "alone":
            straggler = f"0:{self.slowdown}" if self.slowdown > 1.0 else ""
            return self.engine_step(single_process_context("cpu"), straggler)
        if self.entry.name == "periodic":
            self.init_process_group()
            averager = PeriodicModelAverager(period=8)
            return self.compute_step(lambda: averager.average_parameters(self.module.parameters()))
        if self.entry.name in ("ddp_fp16", "ddp_accumulate"):
            return self._ddp_variant()
        return super()._create_step()

    def _ddp_variant(self) -> Step:
        self.init_process_group()
        model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        if self.entry.name == "ddp_fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = self.create_optimizer(model)
        every = 4 if self.entry.name == "ddp_accumulate" else 1

        def step() -> None:
            last = (self.steps + 1) % every == 0
            if self.steps % every == 0:
                optimizer.zero_grad(set_to_none=True)

            def compute() -> None:
                with nullcontext() if last else model.no_sync():
                    (self.task.loss(model, self.next_batch()) / every).backward()

            self.run_compute(compute)
            if last:
                optimizer.step()
            self.steps += 1

        return step
