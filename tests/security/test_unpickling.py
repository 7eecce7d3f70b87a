"""Every place of the package that unpickles, or could, by name, and why it is safe; a new one has to be put here."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import lightning_parallel

ROOT = Path(lightning_parallel.__file__).parent
UNPICKLES = {
    "pickle.loads", "pickle.load", "pickle.Unpickler", "torch.load", "recv", "get_obj", "BaseManager", "SyncManager",
    "Manager", "Listener", "Client", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list", "loads", "load", "Unpickler", "read_pickle",
}  # fmt: skip
OTHERS = {"json.loads", "json.load", "dcp.load", "yaml.safe_load"}  # of such a name, that unpickle nothing
MEMBER = "of a line to the hub, which whoever is at its end has proven to be of the run (reception.py, hosts.py)"
CHILD = "of a pipe that only this process and those forked from it hold"
OWN = "of this process's own bytes, or of what a member gave to the hub"
GROUP = "of torch's process group, which SECURITY.md says how to fence"
SOCKET = "bytes of a socket, which are not unpickled"
LISTED = "by a list of types, unless the user says that the file is trusted"
STATES = "a machine's class, no unpickling"
SAFE: dict[str, tuple[int, str]] = {
    "callbacks/memory.py": (1, GROUP),
    "checkpoint/allowed.py": (5, LISTED),
    "checkpoint/files.py": (1, LISTED),
    "checkpoint/full.py": (1, "a function that is given states, no bytes"),
    "checkpoint/parts.py": (2, LISTED),
    "errors.py": (5, "of a failure: between ranks that have proven the secret (failure/messages.py), or members"),
    "failure/heartbeat_endpoint.py": (1, SOCKET),
    "failure/watch_thread.py": (1, SOCKET),
    "failure/framed_socket.py": (1, SOCKET),
    "pipeline/planning/auto.py": (4, "numbers; " + GROUP),
    "pipeline/transport/axis_line.py": (1, GROUP),
    "pipeline/transport/channel.py": (3, GROUP),
    "pipeline/planning/choice.py": (2, "a function of ours that is called `loads`, of stages"),
    "pipeline/transport/model_replica.py": (2, GROUP),
    "pipeline/transport/parcel.py": (2, GROUP),
    "parameter_server/hosting.py": (1, MEMBER),
    "parameter_server/job.py": (2, STATES),
    "parameter_server/serving.py": (1, MEMBER),
    "parameter_server/transport/inbox.py": (4, SOCKET),
    "parameter_server/transport/link.py": (1, SOCKET),
    "strangers.py": (1, SOCKET),
    "strategies/collectives.py": (2, GROUP),
    "strategies/hybrid_checkpoints.py": (1, GROUP),
    "strategies/server_life.py": (1, MEMBER),
    "strategies/zero_checkpoints.py": (2, GROUP),
    "strategies/zero_division.py": (1, GROUP),
    "trainer/state/callback_states.py": (1, OWN),
    "parameter_server/trainer/coordination/external_coordinator.py": (1, MEMBER),
    "parameter_server/trainer/coordination/remote_servers.py": (1, MEMBER),
    "parameter_server/trainer/coordination/run_coordinator.py": (
        3,
        "of this process itself, or of who has proven itself",
    ),
    "parameter_server/trainer/coordination/later_runs.py": (1, MEMBER),
    "parameter_server/trainer/coordination/run_coordinator_client.py": (4, MEMBER),
    "parameter_server/trainer/coordination/past_runs.py": (1, OWN),
    "trainer/launch/process_launcher.py": (1, "of a file without a name that only this run's processes reach"),
    "trainer/launch/rank_processes.py": (1, CHILD),
    "zero/sharded_gradient.py": (1, GROUP),
}


def places(tree: ast.AST) -> Counter[str]:
    """What a file calls or inherits of that kind, and how often."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for name in map(ast.unparse, used):
            if name not in OTHERS and name.rpartition(".")[2] in UNPICKLES:
                found[name] += 1
    return found


def test_every_place_that_unpickles_is_known():
    found = {str(path.relative_to(ROOT)): places(ast.parse(path.read_text())) for path in ROOT.rglob("*.py")}
    counts = {name: sum(of.values()) for name, of in found.items() if of}
    assert counts == {name: count for name, (count, _) in SAFE.items()}, {
        name: dict(of) for name, of in found.items() if sum(of.values()) != SAFE.get(name, (0, ""))[0]
    }


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(x)",
        "loads(x)",
        "line.recv()",
        "torch.load(p)",
        "dist.gather_object(x)",
        "class A(pickle.Unpickler): 1",
    ],
)
def test_a_new_place_is_found(line):
    assert sum(places(ast.parse(line)).values()) == 1
