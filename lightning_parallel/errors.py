"""What a user sees when a rank fails: the user's own exception, and a note with stage, rank and work in hand.

The one idea: the first failure of a run is the failure of the run, on every rank. So an exception travels between
processes as an instance of its own class, with what it carries and its cause, and `except MyError` around `fit` catches
it wherever it was raised. Left out: who notices a failure and tells the others (``watch.py``).
"""

import importlib
import json
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

_LARGEST_ERROR_BYTES = 1 << 20  # what an exception carries beyond that is told in words instead
_LONGEST_WORDS = 1000
_LONGEST_TEXT, _LONGEST_TRACE = 20_000, 80_000  # characters of a failure that is told in words
_DEEPEST_CAUSE = 5
_MOST_RANKS_NAMED = 16
# What ends the process that raises it. Another one is not interrupted by it, and must not end as if all were well.
_OWN_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class RemoteError(Exception):
    """Stands for another rank's exception whose class is not in this process: its type's name, its text, its traceback.

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
    """The run ends, and there is no exception of the user's that could say so in this process.

    What `fit`, `validate`, `test` and `predict` raise is the user's own exception, on every rank. This class is raised
    where there is none: a rank was killed or stopped, all ranks wait for each other, or the class of another rank's
    exception does not exist here (then ``__cause__`` is a `RemoteError` with its name, text and traceback).

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
        cause = None if self.__cause__ is None else _pack(self.__cause__)
        return _rebuild, (type(self), str(self), self.rank, self.stage, cause)


def _rebuild(kind: type, message: str, rank: int | None, stage: int | None, cause: tuple | None) -> StageError:
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

    def to_plain(self) -> bytes:
        """The failure as JSON, for readers that do not unpickle what they are sent: the error in words, shortened."""
        error, texts = self.error, None
        if error is not None:
            name, text = type(error).__name__, _text(error)
            if isinstance(error, RemoteError):
                name, text = error.type_name, error.text
            texts = [name[:_LONGEST_WORDS], text[:_LONGEST_TEXT], self.traceback_text[-_LONGEST_TRACE:]]
        where, headline = self.where[:_LONGEST_WORDS], self.headline[:_LONGEST_TEXT]
        plain = [self.rank, self.stage, where, headline, texts]
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "backslashreplace")

    @staticmethod
    def from_plain(blob: bytes) -> "Failure":
        """The failure of which another rank told in words; its error is a `RemoteError`.

        Raises:
            ValueError: it is none.
        """
        match json.loads(blob):
            case [int() | None as rank, int() | None as stage, str(where), str(headline), texts]:
                match texts:
                    case None:
                        return Failure(rank, stage, where, None, "", headline)
                    case [str(name), str(text), str(trace)]:
                        return Failure(rank, stage, where, RemoteError(name, text, trace), trace, headline)
        raise ValueError("this is no failure of a rank")

    def to_error(self, stopped: Iterable[int] = (), is_own: bool = False) -> BaseException:
        """The exception to raise: the user's own, with a note that names stage, rank, work and who stopped for it.

        Where there is none, or none that another rank may raise, it is a `StageError`, whose text is the note.

        Args:
            stopped: ranks that stopped because of it.
            is_own: whether this process is the one that raised it; then what interrupts a process is raised too.

        Example:
            >>> error = Failure(1, 1, "the forward of micro-batch 2", ValueError("bad row")).to_error([0, 2, 3])
            >>> error
            ValueError('bad row')
            >>> print(*error.__notes__)
            stage 1 (rank 1) failed in the forward of micro-batch 2
            (rank 0, 2, 3 stopped because of it)
        """
        error, others = self.error, list(stopped)
        trace = f"on rank {self.rank}:\n{self.traceback_text.rstrip()}" if self.traceback_text else ""
        if isinstance(error, StageError):
            return error
        if error is None or isinstance(error, RemoteError) or (type(error) in _OWN_ENDS and not is_own):
            raised = StageError(self.message(others), self.rank, self.stage)
            raised.__cause__ = error
            if error is not None:
                _note_last(error, [trace])
            return raised
        _note_last(error, [trace, self.note(others)])
        return error

    def note(self, stopped: Iterable[int] = ()) -> str:
        """What is said beside the exception."""
        where = f" in {self.where}" if self.where else ""
        others = _listed(list(stopped))
        text = self.headline or f"{name_of(self.rank, self.stage)} failed{where}"
        return f"{text}\n(rank {others} stopped because of it)" if others else text

    def message(self, stopped: Iterable[int] = ()) -> str:
        """What is said where the exception itself is not raised."""
        text, break_, others = self.note(stopped).partition("\n(rank ")
        what = "" if self.error is None or self.headline else f": {describe(self.error)}"
        return f"{text}{what}{break_}{others}"


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
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    """Its text, whatever a class does to be printed."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} that cannot be printed>"


# -- from process to process -------------------------------------------------------------------------------------------


def _pack(error: BaseException, traceback_text: str = "", depth: int = _DEEPEST_CAUSE) -> tuple:
    """An error in a form that other processes can read: pickled, in parts, in words, and its cause.

    Unpickling calls the user's ``__init__`` with `args`, which may want others, or make another text of them.
    """
    whole = _dumped(error)
    if whole is not None:
        try:
            again = pickle.loads(whole)
            whole = whole if type(again) is type(error) and _text(again) == _text(error) else None
        except Exception:
            whole = None
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    packed_cause = None if cause is None or depth == 0 else _pack(cause, "", depth - 1)
    spare = (type(error).__name__, _text(error), traceback_text)
    return whole, None if whole is not None else _parts(error), spare, packed_cause


def _unpack(packed: tuple) -> BaseException:
    """The error, of its own class where this process has that; else a `RemoteError`."""
    whole, parts, spare, cause = packed
    error: BaseException | None = None
    if whole is not None:
        with suppress(Exception):  # the class lives in a module that only the failing rank could import
            error = pickle.loads(whole)
    if error is None and parts is not None:
        error = _joined(*parts)
    if error is None:
        return RemoteError(*spare)
    if cause is not None and error.__cause__ is None:
        error.__cause__ = _unpack(cause)
    return error


def _dumped(value: Any) -> bytes | None:
    try:
        blob = pickle.dumps(value)
    except Exception:
        return None
    return blob if len(blob) <= _LARGEST_ERROR_BYTES else None


def _parts(error: BaseException) -> tuple:
    """The name of its class, arguments of the builtin class under it, its attributes; words where one stays here."""
    kind = type(error)
    try:
        arguments = _builtin(kind).__reduce__(error)[1]
    except Exception:
        arguments = error.args
    attributes = {name: _or_words(value) for name, value in vars(error).items()}
    return kind.__module__, kind.__qualname__, id(kind), [_or_words(value) for value in arguments], attributes


class _Words(str):
    """Stands for a value that stays where it is: what it looked like, in messages that are made of it too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _or_words(value: Any) -> bytes:
    blob = _dumped(value)
    if blob is not None:
        return blob
    try:
        words = repr(value)
    except Exception:
        words = f"<{type(value).__name__}>"
    return pickle.dumps(_Words(words[:_LONGEST_WORDS]))


def _joined(
    module: str, name: str, identity: int, arguments: list[bytes], attributes: Mapping[str, bytes]
) -> BaseException | None:
    """An instance of the class of that name, made without its ``__init__``; None if this process has no such class."""
    kind = _class(module, name, identity)
    if kind is None:
        return None
    try:
        values = [pickle.loads(blob) for blob in arguments]
        error = kind.__new__(kind, *values)
        _builtin(kind).__init__(error, *values)
        vars(error).update({key: pickle.loads(blob) for key, blob in attributes.items()})
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _builtin(kind: type) -> Any:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _class(module: str, name: str, identity: int) -> type | None:
    """A class of exceptions by its name: of its module, or of a function, of which there may be several."""
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:
        found = None
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    same = [kind for kind in _subclasses(BaseException) if (kind.__module__, kind.__qualname__) == (module, name)]
    return next((kind for kind in same if id(kind) == identity), same[-1] if same else None)


def _subclasses(kind: type) -> Iterator[type]:
    found: list[type] = type.__subclasses__(kind)
    for below in found:
        yield below
        yield from _subclasses(below)


def raise_told(told: BaseException, error: BaseException) -> NoReturn:
    """Raise what is to be raised in place of an exception that is being handled; often it is the same.

    Args:
        told: see `Failure.to_error`.
        error: the exception that is being handled.
    """
    if told is error:
        raise error
    raise told from told.__cause__


def add_note(error: BaseException, text: str) -> None:
    """`BaseException.add_note` for Python 3.10 too (where only pytest shows it); the same note is not added twice."""
    if text not in notes_of(error):
        _set_notes(error, [*notes_of(error), text])


def notes_of(error: BaseException) -> list[str]:
    """The notes of an exception."""
    notes = getattr(error, "__notes__", [])
    return list(notes) if isinstance(notes, list | tuple) else []


def _note_last(error: BaseException, texts: Iterable[str]) -> None:
    """Have these notes behind all others, once each."""
    texts = [text for text in texts if text]
    _set_notes(error, [*(note for note in notes_of(error) if note not in texts), *texts])


def _set_notes(error: BaseException, notes: list[str]) -> None:
    if notes:
        vars(error)["__notes__"] = notes  # not as an attribute: a frozen dataclass lets none be set
