"""What a user sees when one rank of a run fails: the stage, the rank, the work in hand and the user's own exception.

The one idea: the first failure of a run is the failure of the run, on every rank. So a ``StageError`` travels between
processes whole, its cause included. Left out: who notices a failure and tells the others (``watch.py``).
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass

_LARGEST_ERROR_BYTES = 1 << 20  # an exception that carries tensors is told in words instead
_MOST_RANKS_NAMED = 16


class RemoteError(Exception):
    """Stands for another rank's exception that does not survive pickling: its type's name, its text, its traceback.

    Example:
        >>> print(RemoteError("mypackage.Odd", "no luck", "Traceback ..."))
        mypackage.Odd: no luck
    """

    def __init__(self, type_name: str, text: str, traceback_text: str = "") -> None:
        super().__init__(type_name, text, traceback_text)
        self.type_name, self.text, self.traceback_text = type_name, text, traceback_text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


class StageError(RuntimeError):
    """One stage failed and the run ends. ``__cause__`` is the user's own exception, on every rank.

    Args:
        message: all that is to be said.
        rank: the global rank that failed, or None when the run as a whole did (all ranks wait for each other).
        stage: the pipeline stage of that rank, or None where there are no stages.
    """

    def __init__(self, message: str, rank: int | None = None, stage: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.stage = rank, stage

    @property
    def lost_rank(self) -> int | None:
        """The rank that cannot say itself what happened to it, since it was killed or stopped."""
        return self.rank if self.__cause__ is None else None

    def __reduce__(self) -> tuple:
        # Pickling drops __cause__, and the cause is the point of this class.
        cause = None if self.__cause__ is None else _pack(self.__cause__, "")
        return _rebuild, (type(self), str(self), self.rank, self.stage, cause)


def _rebuild(kind: type, message: str, rank: int | None, stage: int | None, cause: tuple | None) -> "StageError":
    error = kind(message, rank, stage)
    error.__cause__ = None if cause is None else _unpack(cause)
    return error


@dataclass(frozen=True)
class Failure:
    """A failure of one rank in a form that any process can read.

    Args:
        rank: global rank that failed; None when the ranks wait for each other and none of them is to blame.
        stage: its pipeline stage, if it has one.
        where: the work in hand, as in ``"the forward of micro-batch 2"``; may be empty.
        error: the exception, or None when there is none to show (a killed process).
        traceback_text: the traceback as the failing rank printed it.
        headline: replaces the sentence that is otherwise made from the other fields.
    """

    rank: int | None
    stage: int | None = None
    where: str = ""
    error: BaseException | None = None
    traceback_text: str = ""
    headline: str = ""

    def to_bytes(self) -> bytes:
        """The failure pickled, in two layers: the error may be of a class that the reader cannot import."""
        fields = {**self.__dict__, "error": None}
        return pickle.dumps((fields, None if self.error is None else _pack(self.error, self.traceback_text)))

    @staticmethod
    def from_bytes(blob: bytes) -> "Failure":
        """The failure another rank pickled; an error that cannot be rebuilt here is a `RemoteError`."""
        fields, packed = pickle.loads(blob)
        return Failure(**{**fields, "error": None if packed is None else _unpack(packed)})

    def to_error(self, stopped: Iterable[int] = ()) -> StageError:
        """The exception to raise: the text names the ranks that stopped because of it, the cause is the user's own.

        Example:
            >>> print(Failure(1, 1, "the forward of micro-batch 2", ValueError("bad row")).to_error([0, 2, 3]))
            stage 1 (rank 1) failed in the forward of micro-batch 2: ValueError: bad row
            (rank 0, 2, 3 stopped because of it)
        """
        error = StageError(self.message(stopped), self.rank, self.stage)
        error.__cause__ = self.error
        if self.error is not None and self.traceback_text:
            add_note(self.error, f"on rank {self.rank}:\n{self.traceback_text.rstrip()}")
        return error

    def message(self, stopped: Iterable[int] = ()) -> str:
        """The text of the error without its cause."""
        where = f" in {self.where}" if self.where else ""
        what = "" if self.error is None else f": {describe(self.error)}"
        text = self.headline or f"{name_of(self.rank, self.stage)} failed{where}{what}"
        others = _listed(list(stopped))
        return f"{text}\n(rank {others} stopped because of it)" if others else text


def _listed(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:_MOST_RANKS_NAMED])
    return names if len(ranks) <= _MOST_RANKS_NAMED else f"{names}, ... ({len(ranks)} ranks)"


def name_of(rank: int | None, stage: int | None = None) -> str:
    """How messages call a rank.

    Example:
        >>> name_of(3, stage=0), name_of(3)
        ('stage 0 (rank 3)', 'rank 3')
    """
    return f"rank {rank}" if stage is None else f"stage {stage} (rank {rank})"


def describe(error: BaseException) -> str:
    """An exception as the last line of a traceback has it.

    Example:
        >>> describe(ValueError("bad row")), describe(ValueError())
        ('ValueError: bad row', 'ValueError')
    """
    if isinstance(error, RemoteError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _pack(error: BaseException, traceback_text: str) -> tuple[bytes | None, tuple[str, str, str]]:
    """The error pickled (None when it does not survive that) and what a `RemoteError` is made of."""
    spare = (type(error).__name__, str(error), traceback_text)
    try:
        blob = pickle.dumps(error)
        # Unpickling calls the user's __init__ with `args`: one of other arguments fails here, not on the reader.
        same = len(blob) <= _LARGEST_ERROR_BYTES and type(pickle.loads(blob)) is type(error)
    except Exception:
        same = False
    return (blob if same else None), spare


def _unpack(packed: tuple[bytes | None, tuple[str, str, str]]) -> BaseException:
    blob, spare = packed
    if blob is not None:
        try:
            return pickle.loads(blob)
        except Exception:  # the class lives in a module that only the failing rank could import
            pass
    return RemoteError(*spare)


def add_note(error: BaseException, text: str) -> None:
    """`BaseException.add_note` for Python 3.10 too (where only pytest shows it); the same note is not added twice."""
    notes = getattr(error, "__notes__", [])
    if text not in notes:
        error.__notes__ = [*notes, text]
