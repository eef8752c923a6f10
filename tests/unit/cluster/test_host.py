"""The host without Ray around it: errors that survive pickling, plugins that travel, arguments by reference."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from drumroll.backends.network import interface_of
from drumroll.cluster.cluster import Ref, _slots
from drumroll.cluster.host import Slot, fill, free_port, seat, wrap_error
from drumroll.errors import DataError, PluginError, UserError, WorkerError, WorkerLost
from drumroll.luggage import Luggage
from drumroll.registry import REGISTRY

WHERE = seat("actor_train", 3, "0123456789abcdef")


class PickyError(UserError):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one, two)


class Unpicklable(Exception):
    def __init__(self, key: int) -> None:
        super().__init__(f"key {key}")
        self.lock = (value for value in ())


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize("error", [ValueError("shape"), Unpicklable(7), PickyError("a", "b"), ExceptionGroup("many", [OSError("disk")])])
def test_foreign_errors_become_worker_errors_that_survive_pickling(error: Exception) -> None:
    wrapped = pickle.loads(pickle.dumps(wrap_error(raised(error), WHERE, "train")))
    assert type(wrapped) is WorkerError
    text = str(wrapped)
    assert text.startswith("actor_train rank 3 on node 01234567: train() raised ")
    assert type(error).__name__ in text
    assert "Remote traceback:" in text
    assert "raise error" in text


def test_user_errors_keep_their_class_and_say_where() -> None:
    wrapped = pickle.loads(pickle.dumps(wrap_error(raised(DataError("no column 'answer'")), WHERE, "load")))
    assert type(wrapped) is DataError
    assert str(wrapped) == "no column 'answer' (actor_train rank 3 on node 01234567, load)"


def test_errors_of_other_workers_are_not_wrapped_again() -> None:
    lost = WorkerLost("environment rank 1: gone")
    assert wrap_error(lost, WHERE, "relay") is lost


def test_references_are_found_at_any_depth() -> None:
    first, second = Ref("object 1", "", ""), Ref("object 2", "", "")
    objects: list[object] = []
    template = _slots(((first, [1, second]), {"key": {"inner": (first,)}}), objects)
    assert template == ((Slot(0), [1, Slot(1)]), {"key": {"inner": (Slot(2),)}})
    assert fill(template, objects) == (("object 1", [1, "object 2"]), {"key": {"inner": ("object 1",)}})


def test_plugins_travel_to_another_process(tmp_path: Path) -> None:
    (tmp_path / "installed_plugin.py").write_text(
        "from drumroll.registry import register\n@register.reward('installed')\ndef installed(trajectory): return 1.0\n"
    )
    plugin = tmp_path / "file_plugin.py"
    plugin.write_text("from drumroll.registry import register\n@register.reward('filed')\ndef filed(trajectory): return 2.0\n")
    sender = f"""
import sys
sys.path.append({str(tmp_path)!r})
from drumroll.registry import REGISTRY, register, import_plugin
from drumroll.luggage import Luggage
import pickle
import_plugin("installed_plugin")
import_plugin({str(plugin)!r})
@register.reward("notebook")
def notebook(trajectory): return 3.0
REGISTRY.shipped["shipped"] = lambda trajectory: 4.0
sys.stdout.buffer.write(pickle.dumps(Luggage.pack()))
"""
    receiver = """
import pickle, sys
pickle.load(sys.stdin.buffer).unpack()
from drumroll.registry import REGISTRY
print([REGISTRY.lookup("reward", kind).target(None) for kind in ("installed", "filed", "notebook", "python:shipped")])
"""
    packed = subprocess.run([sys.executable, "-c", sender], capture_output=True, check=True).stdout
    plugin.unlink()  # the source travels, not the path
    answer = subprocess.run([sys.executable, "-c", receiver], input=packed, capture_output=True, check=True).stdout
    assert answer.decode().strip() == "[1.0, 2.0, 3.0, 4.0]"


def test_a_function_that_cannot_be_rebuilt_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="cannot be rebuilt in a worker"):
        Luggage((), {}, (), b"not a pickle").unpack()
    assert "not" not in REGISTRY.shipped


def test_ports_and_interfaces() -> None:
    assert 0 < free_port("127.0.0.1") < 65536
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
