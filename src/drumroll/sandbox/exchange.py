"""How the tests talk to the program: calls and plain values over two pipes, between two guests that do not trust each other.

    examiner                                  candidate
    f(1) ──▶ StandIn ──["ask", "call", …]──▶  f(1)
    2    ◀── decode  ◀─["ok", 2, null]──────  encode

A value of an exact built-in type crosses as a copy. Anything else stays where it is, and the other side gets a `StandIn`, which sends what
is done to it over here. So no method that a program defines ever runs in the examiner: what `==` compares there is plain data, and a
stand-in is equal to none of it.

Messages are JSON with a length before it. A scalar stands for itself; everything else is a list that begins with a tag: `["t", 1, "a"]` is
`(1, "a")`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import importlib
import json
import math
import operator
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, Final

MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_EXACT_INT: Final = 1 << 53
MAX_TEXT: Final = 2000

SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
MAPPINGS: dict[type, str] = {dict: "dict", collections.OrderedDict: "OrderedDict", collections.Counter: "Counter"}
SHARED_TYPES: tuple[type, ...] = (
    *(object, type, type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
    *SEQUENCES,
    *MAPPINGS,
    *(collections.defaultdict, collections.deque, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta),
)
TYPES: dict[str, type] = {kind.__name__: kind for kind in SHARED_TYPES}
"""Types that cross by name: they are the same on both sides."""
NAMES = {kind: name for name, kind in TYPES.items()}

PLAIN_BASES: tuple[Any, ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "next": next,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "equal": operator.eq,
    "is_instance": lambda target, value: isinstance(value, target),
}
"""What may be done to a program's objects from the tests."""

OPERATIONS_ON_TESTS = {name: OPERATIONS[name] for name in ("call", "iter", "next")}
"""What a program may do to what a test has handed it: no attributes, through which it would reach the test itself."""

NOTHING: Final = object()
ENDED: Final = "it has ended"


class LinkLost(BaseException):
    """The other side has ended, or has broken the rules. No `except Exception` of a test catches it."""


class Link:
    """One side's end of the exchange: asks the other side, and answers what it asks meanwhile.

    A side waits only for the answer to its own question; while it waits, it serves the other side's questions, such as a call of a function
    that it has handed over.
    """

    def __init__(self, reader: BinaryIO, writer: BinaryIO, operations: Mapping[str, Callable[..., Any]]) -> None:
        self.reader = reader
        self.writer = writer
        self.operations = operations
        self.lost = ""
        self.given: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.stand_ins: dict[int, Any] = {}

    def ask(self, operation: str, target: int, /, *args: Any, **kwargs: Any) -> Any:
        """Does something to an object of the other side. Arguments that this changes there are changed here, too."""
        self.send(["ask", operation, target, [self.encode(value) for value in args], self.encode(kwargs)])
        answer = self.wait()
        try:
            if answer[2] is not None:
                new_args, new_kwargs = ([self.decode(value) for value in answer[2][0]], self.decode(answer[2][1]))
                restore(list(args), new_args)
                restore(kwargs, new_kwargs)
            if answer[0] == "ok":
                return self.decode(answer[1])
            error = self.decode_error(answer[1])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, ImportError) as problem:
            raise self.lose(f"it sent a value that is none ({type(problem).__name__})") from None
        if isinstance(error, StopIteration) and operation != "next":  # `all(map(f, …))` would take it for the end of the loop
            error = RuntimeError("the program raised StopIteration")
            error.__dict__["from_program"] = True
        raise error

    def wait(self) -> list[Any]:
        """The next answer; questions that come before it are served."""
        while True:
            message = self.receive()
            if message[0] != "ask":
                return message
            self.answer(message)

    def serve(self) -> None:
        """Answers questions until the other side has gone."""
        while True:
            self.answer(self.receive())

    def answer(self, message: list[Any]) -> None:
        """Does what the other side asks for, and sends the result, or the error, with the arguments as they are now."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        try:
            _, operation, target, sent_args, sent_kwargs = message
            args, kwargs = [self.decode(value) for value in sent_args], self.decode(sent_kwargs)
            kind, result = "ok", self.encode(self.operations[operation](self.given[target], *args, **kwargs))
        except Exception as error:
            kind, result = "raise", self.encode_error(error)
        changes = None
        try:
            if args or kwargs:
                now = [[self.encode(value) for value in args], self.encode(kwargs)]
                changes = now if now != [sent_args, sent_kwargs] else None
            self.send([kind, result, changes])
        except (ValueError, RecursionError, MemoryError) as error:
            self.send(["raise", self.encode_error(error), None])

    # Messages.

    def send(self, message: list[Any]) -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(text)} bytes is too large to be handed over; the limit is {MAX_MESSAGE_BYTES}")
        try:
            self.writer.write(struct.pack("<Q", len(text)) + text)
            self.writer.flush()
        except OSError:
            raise self.lose(ENDED) from None

    def receive(self) -> list[Any]:
        if self.lost:
            raise LinkLost(self.lost)
        head = self.reader.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if length > MAX_MESSAGE_BYTES:
            raise self.lose("it sent a message that is too long")
        text = self.reader.read(length)
        if length == 0 or len(text) < length:
            raise self.lose(ENDED)
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise self.lose("it sent what is no message") from None
        if not isinstance(message, list) or len(message) != (5 if message[:1] == ["ask"] else 3):
            raise self.lose("it sent what is no message")
        return message

    def lose(self, reason: str) -> LinkLost:
        """Marks the other side as unusable from now on."""
        self.lost = reason
        return LinkLost(reason)

    # Values.

    def encode(self, value: Any) -> Any:
        """A value as JSON. Only exact built-in types become data; anything else is given away as a number."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -MAX_EXACT_INT < value < MAX_EXACT_INT else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if kind in SEQUENCES:
            return [SEQUENCES[kind], *map(self.encode, value)]
        if kind in MAPPINGS:
            return [MAPPINGS[kind], *self.encode_items(value)]
        if kind is StandIn:
            return ["yours", number_of(value)]
        if kind is types.ModuleType and value.__name__.partition(".")[0] in sys.stdlib_module_names:
            return ["module", value.__name__]
        if isinstance(value, type):
            return self.encode_type(value)
        rare = encode_rare(value)
        if rare is not None:
            return rare
        if kind is collections.defaultdict:
            return ["defaultdict", NAMES.get(value.default_factory), *self.encode_items(value)]
        if kind is collections.deque:
            return ["deque", value.maxlen, *map(self.encode, value)]
        if kind is slice:
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        base = next((base for base in PLAIN_BASES if isinstance(value, base) and kind.__eq__ is base.__eq__), None)
        plain = [] if base is None else [self.encode(base(value))]
        return ["mine", self.give(value), *plain]

    def encode_items(self, value: Mapping[Any, Any]) -> Iterable[Any]:
        return (self.encode(part) for item in value.items() for part in item)

    def encode_type(self, value: type) -> Any:
        if value in NAMES:
            return ["type", NAMES[value]]
        if issubclass(value, Exception):
            return ["exception", -1 if is_builtin(value) else self.give(value), nearest_builtin(value).__name__, value.__name__]
        return ["mine", self.give(value)]

    def give(self, value: Any) -> int:
        """The number under which the other side may use a value from now on. It stays the same for the same object."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.given)
            self.given.append(value)
        return number

    def decode(self, data: Any) -> Any:
        """What `encode` on the other side meant. Anything that it cannot have sent raises."""
        if not isinstance(data, list):
            if data is None or isinstance(data, bool | int | float | str):
                return data
            raise TypeError("no value")
        tag, *rest = data
        if tag in DECODERS:
            return DECODERS[tag](self, rest)
        return decode_rare(tag, rest)

    def decode_items(self, data: list[Any]) -> Iterable[tuple[Any, Any]]:
        values = [self.decode(part) for part in data]
        return zip(values[::2], values[1::2], strict=True)

    def stand_in(self, number: int, plain: list[Any]) -> Any:
        """The stand-in for the other side's object: the same one whenever that object comes."""
        if number not in self.stand_ins:
            self.stand_ins[number] = StandIn(self, number)
        stand_in = self.stand_ins[number]
        object.__setattr__(stand_in, "_StandIn__plain", self.decode(plain[0]) if plain else NOTHING)
        return stand_in

    def exception(self, number: int, base: str, name: str) -> type[Exception]:
        """An exception class: a built-in one itself, and for one of the program's own a class here that stands for it."""
        builtin = builtin_exception(base)
        if number < 0:
            return builtin
        if number not in self.stand_ins:
            self.stand_ins[number] = type(name, (builtin,), {})
        kind = self.stand_ins[number]
        if not isinstance(kind, type):
            raise TypeError("no exception")
        return kind

    # Errors.

    def encode_error(self, error: Exception) -> list[Any]:
        """An error's class, its arguments if they are scalars, and its text."""
        arguments = list(error.args) if all(type(value) in (str, int, float, bool, type(None)) for value in error.args) else None
        try:
            text = str(error)
        except Exception:
            text = ""
        text = text[:MAX_TEXT]
        if arguments is None or sum(len(value) for value in arguments if isinstance(value, str)) > MAX_TEXT:
            arguments = [text]
        return [self.encode_type(type(error)), [self.encode(value) for value in arguments], text]

    def decode_error(self, data: list[Any]) -> Exception:
        """The error to raise here, marked as the other side's."""
        kind, text = self.decode(data[0]), str(data[2])
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError("no exception")
        error = make_error(kind, [self.decode(value) for value in data[1]], text)
        error.__dict__["from_program"] = True
        return error


class StandIn:
    """An object of the other side. What is done to it is done there; compared with plain data it is never equal.

    A value of a class that only extends a built-in type, such as a named tuple, comes with a plain copy, which is what `==` compares.
    """

    __slots__ = ("__link", "__number", "__plain")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_StandIn__link", link)
        object.__setattr__(self, "_StandIn__number", number)
        object.__setattr__(self, "_StandIn__plain", NOTHING)

    def __do(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.__link.ask(operation, self.__number, *args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__do("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.__do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__do("set", name, value)

    def __iter__(self) -> Any:
        return self.__do("iter")

    def __next__(self) -> Any:
        return self.__do("next")

    def __getitem__(self, key: Any) -> Any:
        return self.__do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__do("set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        self.__do("delete_item", key)

    def __len__(self) -> int:
        return int(self.__do("len"))

    def __bool__(self) -> bool:
        return bool(self.__do("bool"))

    def __str__(self) -> str:
        return str(self.__do("str"))

    def __repr__(self) -> str:
        return str(self.__do("repr"))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is StandIn:
            return bool(self.__do("equal", other))
        plain = self.__plain
        return plain is not NOTHING and bool(plain == other)

    def __hash__(self) -> int:
        return id(self)

    def __instancecheck__(self, value: object) -> bool:
        return bool(self.__do("is_instance", value))

    def __reduce__(self) -> Any:
        raise TypeError("an object of the program cannot be copied by a test")


def number_of(stand_in: StandIn) -> int:
    number = object.__getattribute__(stand_in, "_StandIn__number")
    assert isinstance(number, int)
    return number


def encode_rare(value: Any) -> Any:
    """The remaining plain types, which hold scalars only. None for what is of no such type."""
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", repr(value.real), repr(value.imag)]
    if kind is range:
        return ["range", hex(value.start), hex(value.stop), hex(value.step)]
    if kind is decimal.Decimal:
        return ["Decimal", str(value)]
    if kind is fractions.Fraction:
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind is datetime.date or (kind in (datetime.datetime, datetime.time) and type(value.tzinfo) in (type(None), datetime.timezone)):
        return [kind.__name__, value.isoformat()]
    return None


def decode_rare(tag: Any, rest: list[Any]) -> Any:
    """What `encode_rare` meant."""
    if tag == "int":
        return int(rest[0], 16)
    if tag in ("bytes", "bytearray"):
        return TYPES[tag].fromhex(rest[0])  # type: ignore[attr-defined]
    if tag in ("range", "Fraction"):
        return TYPES[tag](*[int(part, 16) for part in rest])
    if tag == "complex":
        return complex(float(rest[0]), float(rest[1]))
    if tag in ("float", "Decimal", "timedelta"):
        return TYPES[tag](*rest)
    if tag in ("date", "time", "datetime"):
        return TYPES[tag].fromisoformat(rest[0])  # type: ignore[attr-defined]
    raise TypeError("no value")


DECODERS: dict[str, Callable[[Link, list[Any]], Any]] = {
    "list": lambda link, rest: [link.decode(part) for part in rest],
    "tuple": lambda link, rest: tuple([link.decode(part) for part in rest]),
    "set": lambda link, rest: {link.decode(part) for part in rest},
    "frozenset": lambda link, rest: frozenset([link.decode(part) for part in rest]),
    "dict": lambda link, rest: dict(link.decode_items(rest)),
    "OrderedDict": lambda link, rest: collections.OrderedDict(link.decode_items(rest)),
    "Counter": lambda link, rest: collections.Counter(dict(link.decode_items(rest))),
    "defaultdict": lambda link, rest: collections.defaultdict(TYPES[rest[0]] if rest[0] else None, link.decode_items(rest[1:])),
    "deque": lambda link, rest: collections.deque([link.decode(part) for part in rest[1:]], rest[0]),
    "slice": lambda link, rest: slice(*[link.decode(part) for part in rest]),
    "type": lambda link, rest: TYPES[rest[0]],
    "module": lambda link, rest: standard_module(rest[0]),
    "exception": lambda link, rest: link.exception(*rest),
    "yours": lambda link, rest: link.given[rest[0]],
    "mine": lambda link, rest: link.stand_in(rest[0], rest[1:]),
}


def standard_module(name: str) -> types.ModuleType:
    """A module of the standard library, imported on this side."""
    if name.partition(".")[0] not in sys.stdlib_module_names:
        raise TypeError(f"{name} is no module of the standard library")
    return importlib.import_module(name)


def is_builtin(kind: type) -> bool:
    return getattr(builtins, kind.__name__, None) is kind


def nearest_builtin(kind: type[Exception]) -> type[Exception]:
    """The first built-in exception among a class and its bases."""
    return next(base for base in kind.__mro__ if is_builtin(base) and issubclass(base, Exception))


def builtin_exception(name: str) -> type[Exception]:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError("no exception")
    return kind


def make_error(kind: type[Exception], args: list[Any], text: str) -> Exception:
    """An exception of a class, or of its nearest base that takes such arguments."""
    for base, arguments in ((kind, args), *((base, [text]) for base in kind.__mro__[1:])):
        with contextlib.suppress(Exception):
            error: Exception = base(*arguments)
            return error
    return RuntimeError(text)


def restore(old: Any, new: Any) -> Any:
    """Makes `old` equal to `new` in place, as far as both are containers of one kind, and returns what should stand in its place.

    Example: after `restore(rows, [[1], [2]])` with `rows = [first, []]`, `first` is still in `rows` and is `[1]`.
    """
    if type(old) is not type(new):
        return new
    if isinstance(old, list | collections.deque):
        merged = [restore(a, b) for a, b in zip(old, new, strict=False)]
        rest = list(new)[len(merged) :]
        old.clear()
        old.extend([*merged, *rest])
    elif isinstance(old, dict):
        entries = {key: restore(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(entries)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, tuple):
        merged = [restore(a, b) for a, b in zip(old, new, strict=False)]
        return old if len(old) == len(new) and all(a is b for a, b in zip(old, merged, strict=True)) else new
    else:
        return new
    return old
