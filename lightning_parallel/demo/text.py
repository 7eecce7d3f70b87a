"""English text, byte by byte: Python's own language reference as ``help()`` shows it, 466 kB, in every CPython."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class TextWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text: row i is {"input_ids": int64 [context]}, values 0..255."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.rows = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index].long()}


class TextDataModule(LightningDataModule):
    """A text in windows of ``context`` bytes; a batch is {"input_ids": int64 [B, context]}.

    The last tenth of the text validates. Short last batches are left out of training.

    Args:
        context: bytes a row.
        batch_size: rows a batch.
        path: a text file of your own; none takes the language reference.
        num_workers: processes that load; 0 loads in the training process.
    """

    def __init__(self, context: int = 128, batch_size: int = 32, path: str | None = None, num_workers: int = 0) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.path = path
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        text = torch.frombuffer(bytearray(self._read()), dtype=torch.uint8)
        cut = len(text) * 9 // 10
        self.train, self.validation = TextWindows(text[:cut], self.context), TextWindows(text[cut:], self.context)
        if not len(self.validation):
            raise ValueError(
                f"TextDataModule(context={self.context}) got a text of {len(text)} bytes, of which a tenth validates. "
                f"It must be at least {10 * self.context} bytes long, or context at most {len(text) // 10}."
            )

    def _read(self) -> bytes:
        if self.path is not None:
            return Path(self.path).read_bytes()
        from pydoc_data.topics import topics

        return "".join(topics.values()).encode()

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            self.train, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.validation, batch_size=self.batch_size, num_workers=self.num_workers)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader
