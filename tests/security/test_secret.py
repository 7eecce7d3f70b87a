"""The secret of a run: where it comes from, who is refused, and that it is left nowhere."""

import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_parallel.secret import SECRET, SECRET_FILE, Secret
from tests.harness import run_ranks

TEXT = "0123456789abcdef"


def write(path: Path, text: str = TEXT, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_it_is_the_users_where_the_user_set_one(tmp_path):
    path = write(tmp_path / "secret", f" {TEXT}\n")
    assert Secret.of_run({}) is None
    assert Secret.of_run({SECRET: "", SECRET_FILE: ""}) is None
    assert Secret.of_run({SECRET: TEXT}) == Secret.of_run({SECRET_FILE: path}) == Secret(TEXT)
    assert Secret.of_run({SECRET: TEXT[::-1], SECRET_FILE: path}) == Secret(TEXT[::-1])
    (tmp_path / "link").symlink_to(path)  # as Kubernetes mounts one
    assert Secret.of_run({SECRET_FILE: str(tmp_path / "link")}) == Secret(TEXT)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o660])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path, mode: int):
    path = write(tmp_path / "secret", mode=mode)
    words = f"{SECRET_FILE}={path} has mode {mode:o} and belongs to user {os.getuid()}.*`chmod 600 {path}`"
    with pytest.raises(ValueError, match=words):
        Secret.of_run({SECRET_FILE: path})


def test_a_file_of_somebody_else_is_refused(tmp_path, monkeypatch):
    path, own = write(tmp_path / "secret"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ValueError, match=f"belongs to user {own}. It has to be a file of user {own + 1}"):
        Secret.of_run({SECRET_FILE: path})


def test_what_is_no_secret_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match=f"has 15 characters. Set {SECRET} to 16 or more characters.*openssl rand"):
        Secret.of_run({SECRET: TEXT[1:]})
    with pytest.raises(ValueError, match=f"{SECRET_FILE}=.* holds 15 characters. Write 16 or more into it"):
        Secret.of_run({SECRET_FILE: write(tmp_path / "short", TEXT[1:])})
    with pytest.raises(ValueError, match=f"{SECRET_FILE}=/nowhere cannot be read: .*No such file.*name a file"):
        Secret.of_run({SECRET_FILE: "/nowhere"})
    os.mkfifo(tmp_path / "pipe", 0o600)  # nobody ever writes into it
    with pytest.raises(ValueError, match="It has to be a file"):
        Secret.of_run({SECRET_FILE: str(tmp_path / "pipe")})


def test_it_is_not_shown_and_passes_in_memory():
    secret = Secret(TEXT)
    assert TEXT not in f"{secret} {secret!r} {secret.key('watch')!r}"
    assert pickle.loads(pickle.dumps(secret)) == secret != Secret.make() != Secret.make()
    keys = {secret.key("a", b"b"), secret.key("ab"), secret.key("a"), secret.key("a", b"c"), Secret.make().key("a")}
    assert len(keys) == 5


def test_the_environment_is_as_before(monkeypatch):
    for before in (None, TEXT):
        monkeypatch.delenv(SECRET, raising=False) if before is None else monkeypatch.setenv(SECRET, before)
        with suppress(KeyError), Secret(TEXT[::-1]).in_environment():
            assert Secret.of_run() == Secret(TEXT[::-1])
            raise KeyError
        assert os.environ.get(SECRET) == before


def test_ranks_on_several_hosts_have_the_users_or_none(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert Secret.for_ranks(num_hosts=2) is None
    assert Secret.for_ranks() != Secret.for_ranks()
    monkeypatch.setenv(SECRET, TEXT)
    assert Secret.for_ranks() == Secret.for_ranks(num_hosts=2) == Secret(TEXT)


def test_what_a_launcher_handed_down_comes_before_the_environment():
    def kept(rank: int) -> bool:
        os.environ[SECRET] = TEXT[::-1]
        Secret(TEXT).keep()
        return Secret.of_run() == Secret(TEXT)

    assert run_ranks(kept, 1, group=False) == [True]
