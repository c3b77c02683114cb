"""Lightning: its Trainer owns the loop, so it runs in a thread of its own and trains a step whenever a batch is given."""

import logging
import queue
import threading
import warnings

import lightning
import torch

from workloads import CLIP, DECAY, RATE, mean_loss

__all__ = ["step_of"]


def step_of(workload):
    """``step(batch) -> loss`` with a Trainer that does nothing beside training: no logger, no bar, no checkpoints."""
    asked, done = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=_fit, args=(workload, asked, done), daemon=True).start()
    done.get()  # the first batch is asked for: set up

    def step(batch):
        asked.put(batch)
        loss = done.get()
        if isinstance(loss, BaseException):
            raise loss
        return loss

    return step


def _fit(workload, asked, done):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    module = _Module(workload)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=workload.micro,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, _Batches(workload.micro, module, asked, done))
    except BaseException as error:
        done.put(error)
        raise


class _Batches:
    """A loader without an end in sight: a request for the next batch says that the step before is done."""

    def __len__(self):
        return 10**9  # of a loader with a length, Lightning takes no batch ahead

    def __init__(self, micro, module, asked, done):
        self.micro, self.module, self.asked, self.done = micro, module, asked, done

    def __iter__(self):
        while True:
            self.done.put(self.module.take_total())
            batch = self.asked.get()
            yield from zip(*(leaf.chunk(self.micro) for leaf in batch), strict=True)


class _Module(lightning.LightningModule):
    def __init__(self, workload):
        super().__init__()
        self.model, self.micro, self.total = workload.make(), workload.micro, 0.0

    def take_total(self):
        """The loss of the step before."""
        total, self.total = self.total, 0.0
        return total

    def training_step(self, batch, index):
        loss = mean_loss(self.model, batch)
        self.total = self.total + loss.detach() / self.micro
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
