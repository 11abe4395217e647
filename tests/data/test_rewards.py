"""Verifier pools under functions that raise, hang, crash or return nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hpcflow.data import rewards
from hpcflow.data.rewards import VerifierPool, clean_environment

ACT = "tests.data.verifier_functions:act"
ROOT = Path(__file__).parents[2]


def samples(*responses: str) -> list[dict]:
    return [{"prompt": "p", "response": response, "record": {}} for response in responses]


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(ACT, processes=2, timeout_s=60) as pool:
        yield pool


def test_values_in_order(pool):
    reward, ok, errors, *_ = pool.score(samples(*(f"number {i / 8}" for i in range(100))))
    assert reward.dtype == torch.float32 and ok.dtype == torch.bool
    assert torch.equal(reward, torch.arange(100) / 8)
    assert ok.all() and errors == [""] * 100


def test_no_samples(pool):
    reward, ok, errors, *_ = pool.score([])
    assert reward.shape == ok.shape == (0,) and errors == []


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("raise some key", "KeyError: 'some key' (verifier_functions.py:"),
        ("bad_message", "_BadMessage: (its message cannot be made)"),
        ("sysexit", "SystemExit: bye"),
        ("exit 3", "the verifier's process ended: exit code 3"),
        ("exit 0", "the verifier's process ended: exit code 0"),
        ("segfault", "the verifier's process ended: killed by SIGSEGV"),
        ("recurse", "RecursionError"),
        ("nan", "the function returned nan, not a finite"),
        ("inf", "the function returned inf, not a finite"),
        ("huge", "the function returned 1e+300, not a finite float32"),
        ("none", "the function returned NoneType 'None', not a number"),
        ("text", "the function returned str '1.0', not a number"),
        ("close_files", "the verifier's process ended"),
        ("unknown_action", "KeyError: 'unknown_action'"),
    ],
)
def test_a_failure_costs_its_own_sample_only(pool, response, error):
    reward, ok, errors, *_ = pool.score(samples("number 1", response, "number 2", "number 3"))
    assert ok.tolist() == [True, False, True, True]
    assert reward.tolist() == [1, 0, 2, 3]
    assert error in errors[1] and [errors[i] for i in (0, 2, 3)] == [""] * 3
    again, ok, *_ = pool.score(samples(*["number 4"] * 6))
    assert ok.all() and again.tolist() == [4] * 6


def test_accepted_types_and_harmless_noise(pool):
    reward, ok, errors, *_ = pool.score(samples("numpy 0.5", "bool True", "bool False", "print", "stdin"))
    assert ok.all(), errors
    assert reward.tolist() == [0.5, 1, 0, 3, 0]


def test_error_text_is_bounded(pool):
    _, ok, errors, *_ = pool.score(samples("long_error"))
    assert not ok[0] and 1000 < len(errors[0]) < 3000


def test_all_samples_fail(pool):
    _, ok, errors, *_ = pool.score(samples(*["exit 1"] * 9))
    assert not ok.any() and all("exit code 1" in error for error in errors)


def test_a_function_that_forks_answers_once(pool):
    reward, ok, *_ = pool.score(samples("fork", *["number 2"] * 5))
    assert ok.all() and reward.tolist() == [7, 2, 2, 2, 2, 2]


def test_large_samples(pool):
    big = samples("number 1", "number 2")
    for sample in big:
        sample["prompt"] = "x" * 5_000_000
    assert pool.score(big)[0].tolist() == [1, 2]


def test_processes_have_no_torch(pool):
    assert pool.score(samples("torch"))[0].tolist() == [0]


def test_hanging_calls_are_killed_with_what_they_started(tmp_path):
    note = tmp_path / "pids"
    with VerifierPool(ACT, processes=2, timeout_s=2) as pool:
        reward, ok, errors, *_ = pool.score(
            samples("sleep", "number 1", f"spawn {note}", "number 2", "sleep")
        )
        assert ok.tolist() == [False, True, False, True, False]
        assert reward.tolist() == [0, 1, 0, 2, 0]
        assert [errors[i] for i in (0, 2, 4)] == ["no answer within 2 s"] * 3
        wait_until_gone(note)
        assert pool.score(samples("number 5"))[0].tolist() == [5]


def test_an_answer_that_comes_at_the_limit_counts(monkeypatch):
    """Heard in the same turn in which its time is over."""
    wait = VerifierPool._wait
    monkeypatch.setattr(VerifierPool, "_wait", staticmethod(lambda busy, deadline: wait(busy, deadline + 30)))
    with VerifierPool(ACT, processes=1, timeout_s=1e-9) as pool:
        reward, ok, errors, *_ = pool.score(samples("number 3", "number 4"))
        assert reward.tolist() == [3, 4] and ok.all() and errors == ["", ""]


def test_calls_without_a_result_are_made_again_a_bounded_number_of_times(tmp_path):
    actions = ["1 raise x", "2 exit 3", "1 sleep", "9 segfault", "9 nan", "0 sleep"]
    files = [tmp_path / str(i) for i in range(len(actions))]
    with VerifierPool(ACT, processes=2, timeout_s=1, retries=2) as pool:
        said = samples(*(f"at_first {file} {action}" for file, action in zip(files, actions, strict=True)))
        reward, ok, errors, attempts = pool.score(said)
        assert pool.score(samples("number 2"))[0].tolist() == [2]
    assert attempts.dtype == torch.int32 and attempts.tolist() == [2, 3, 2, 3, 1, 1]
    assert [file.stat().st_size for file in files] == attempts.tolist()
    assert ok.tolist() == [True, True, True, False, False, True] and reward.tolist() == [1, 1, 1, 0, 0, 1]
    assert "killed by SIGSEGV" in errors[3] and "returned nan" in errors[4] and not any(errors[:3])


def test_a_process_killed_between_calls_costs_nothing():
    with VerifierPool(ACT, processes=1, timeout_s=60) as pool:
        pool.score(samples("number 1"))
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        # The end of its stream is there.
        assert pool._wait(pool.processes, time.monotonic() + 30) == pool.processes
        reward, ok, errors, *_ = pool.score(samples("number 2"))
        assert ok.all() and reward.tolist() == [2], errors


def test_an_interrupted_call_leaves_a_usable_pool(monkeypatch):
    with VerifierPool(ACT, processes=1, timeout_s=60) as pool:
        monkeypatch.setattr(pool, "_hear", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.score(samples("number 1", "number 2"))
        monkeypatch.undo()
        assert pool.score(samples("number 3"))[0].tolist() == [3]


def test_arguments_and_preparation():
    with VerifierPool(ACT, processes=1, timeout_s=60, args={"scale": 3}) as pool:
        assert pool.score(samples("number 2"))[0].tolist() == [6]
    function = "tests.data.verifier_functions:with_preparation"
    with VerifierPool(function, processes=1, timeout_s=60, args={"number": 2}) as pool:
        assert pool.score(samples("x"))[0].tolist() == [22]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tests.data.verifier_functions:akt", "act"),
        ("tests.data.no_such_module:f", "no module"),
        ("not a path", "package.module:name"),
        ("tests.data.verifier_functions:cannot_prepare", "exit code 5"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(function, message):
    with pytest.raises(ValueError, match=message):
        VerifierPool(function, processes=2, timeout_s=60)


def test_environment_is_sanitised():
    foreign = [
        "PMI_RANK", "PMI_FD", "PMIX_RANK", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_RANK", "HYDI_CONTROL_FD",
        "FI_PROVIDER", "MPIR_CVAR_CH3", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD", "SLURM_PROCID",
        "SLURM_STEP_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "HPCFLOW_FORKSERVER",
    ]  # fmt: skip
    kept = [
        "PATH",
        "HOME",
        "SLURM_JOB_ID",
        "OMP_NUM_THREADS",
        "HPCFLOW_CACHE",
        "FINANCE",
        "RANKING",
        "MY_PMI_RANK",
    ]
    assert list(clean_environment(dict.fromkeys(foreign + kept, "1"))) == kept


def test_processes_get_the_sanitised_environment():
    code = f"""
from hpcflow.data import rewards
rewards.prepare()
import os
os.environ["SET_LATER"] = "1"  # as MPI_Init and vLLM do
pool = rewards.VerifierPool({ACT!r}, processes=1, timeout_s=60)
sample = {{"prompt": "", "response": "environment PMI_RANK,VLLM_X,SET_LATER,LD_PRELOAD", "record": {{}}}}
kept = {{"prompt": "", "response": "environment KEPT", "record": {{}}}}
print(pool.score([sample, kept])[0].tolist())
"""
    environment = os.environ | {"PMI_RANK": "0", "VLLM_X": "1", "KEPT": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.stdout.splitlines() == ["[0.0, 1.0]"], result.stderr


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_nothing_survives_a_kill(tmp_path, victim):
    note = tmp_path / "pids"
    code = f"""
import sys
from hpcflow.data import rewards
pool = rewards.VerifierPool({ACT!r}, processes=2, timeout_s=600)
print(pool.server.process.pid, *(p.pid for p in pool.processes), flush=True)
pool.score([{{"prompt": "", "response": response, "record": {{}}}} for response in ("spawn {note}", "sleep")])
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    server, *verifiers = map(int, owner.stdout.readline().split())
    wait_for_text(note)
    os.kill({"owner": owner.pid, "server": server}[victim], signal.SIGKILL)
    assert owner.wait(timeout=60) != 0
    if victim == "server":
        os.kill(int(note.read_text().split()[1]), signal.SIGKILL)  # nobody is left to end the grandchild
        assert "RuntimeError: the server of verifier processes has ended" in owner.communicate()[1]
    wait_until_gone(note, *verifiers, server)


def test_a_fork_of_the_owner_makes_a_server_of_its_own(pool):
    server = rewards._server
    assert server.usable()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"1" if server.usable() else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"0"


def wait_for_text(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, "the verifier did not start"
        time.sleep(0.01)


def wait_until_gone(note: Path, *more: int) -> None:
    pids = [*map(int, note.read_text().split()), *more]
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"some of {pids} are still running"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
