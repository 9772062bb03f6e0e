"""Hands loaders to Accelerate, HuggingFace's Trainer and Lightning the wrong way.

Run under torchrun with names of cases. Each rank writes what it got, warnings and errors included,
to ``$BOOK/<case>-rank<r>.json``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from my_project import make_dataset
from torch.utils.data import DataLoader, RandomSampler

from headrace import HeadraceError, create_dataloader
from headrace.order import OrderSampler, RankBatches


def loader_of(name: str = "train", **options: Any) -> Any:
    return create_dataloader(make_dataset(name), **{"batch_size": 4, "num_workers": 0} | options)


def drawn(loader: Any) -> dict[str, Any]:
    """The indices of each batch."""
    return {"batches": [batch["index"].tolist() for batch in loader]}


# -- Accelerate


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def prepared() -> Any:
    accelerator = _accelerator()
    with loader_of(num_workers=1) as loader:
        # twice, and what it marks does no harm
        same = accelerator.prepare(loader) is loader and accelerator.prepare(loader) is loader
        return {"same": same, **drawn(loader)}


def prepared_for_one() -> Any:
    """A loader that was made for one process is shared out by Accelerate, once."""
    accelerator = _accelerator()
    return drawn(accelerator.prepare(loader_of(rank=0, world_size=1)))


def prepared_random_sampler() -> Any:
    """So is one whose order is the user's."""
    accelerator = _accelerator()
    return drawn(accelerator.prepare(loader_of(sampler=RandomSampler(make_dataset("train")))))


def _unmarked(dispatch: bool | None = None) -> Any:
    """Accelerate's own function, as a version of it would call it that doesn't look whether a
    loader is prepared.
    """
    from accelerate.data_loader import prepare_data_loader

    device = _accelerator().device
    loader = loader_of()
    return drawn(prepare_data_loader(loader, device, put_on_device=True, dispatch_batches=dispatch))


def sharded_again() -> Any:
    return _unmarked()


def dispatched() -> Any:
    return _unmarked(dispatch=True)


def sampler_sharded_again() -> Any:
    """An OrderSampler in a plain DataLoader that is prepared."""
    accelerator, dataset = _accelerator(), make_dataset("train")
    plain = DataLoader(dataset, 4, sampler=OrderSampler(dataset, batch_size=4))
    return drawn(accelerator.prepare(plain))


def batches_sharded_again() -> Any:
    """A RankBatches as batch sampler of a plain DataLoader that is prepared."""
    accelerator, dataset = _accelerator(), make_dataset("train")
    batches: Any = OrderSampler(dataset, batch_size=4).batches
    assert isinstance(batches, RankBatches)
    return drawn(accelerator.prepare(DataLoader(dataset, batch_sampler=batches)))


def skipped() -> Any:
    """Resumed by skip_first_batches, as the Trainer does it without ignore_data_skip."""
    from accelerate import skip_first_batches

    _accelerator()
    return drawn(skip_first_batches(loader_of(), 2))


# -- others


def made_too_early() -> Any:
    """A loader that was made before the process group, without a launcher's word."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    hidden = {name: os.environ.pop(name) for name in names}
    loader = loader_of()
    os.environ.update(hidden)
    dist.init_process_group("gloo")
    return drawn(loader)


def _lightning(**options: Any) -> Any:
    import lightning
    from my_project import make_model

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = make_model(), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch["index"].tolist())
            return self.model(**batch)["loss"]

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch["index"].tolist())

        def configure_optimizers(self) -> None:
            return None

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= dict.fromkeys(names, False)
    return Module(), lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", **options)


def predicted() -> Any:
    """Lightning makes another loader for a prediction, of the arguments of this one."""
    module, trainer = _lightning()
    trainer.predict(module, loader_of("val", shuffle=False, pad=False))
    return {"batches": module.seen}


def fitted(epochs: int, options: dict[str, Any] | None = None, **of_loader: Any) -> Any:
    module, trainer = _lightning(max_epochs=epochs, **(options or {}))
    trainer.fit(module, loader_of(**of_loader))
    return {"batches": module.seen}


def passed_loaders() -> Any:
    return fitted(2)


def overfitted() -> Any:
    """overfit_batches replaces the sampler."""
    return fitted(2, {"overfit_batches": 2})


def own_sampler() -> Any:
    """Lightning replaces the user's sampler by one that shares out."""
    return fitted(1, sampler=RandomSampler(make_dataset("train")))


def main(case: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = globals()[case]()
        except HeadraceError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
    found["warnings"] = [str(w.message) for w in caught if w.category.__name__ == "HeadraceWarning"]
    path = Path(os.environ["BOOK"]) / f"{case}-rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
