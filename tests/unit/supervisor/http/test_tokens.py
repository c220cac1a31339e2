"""The file of tokens: what it may have, who may read it, and that it is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memwal_ops.errors import InvalidConfigError
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.model import HttpConfig
from memwal_ops.supervisor.http.access import TokenFile, token_file_of

OPERATE, VIEW = "o" * 32, "v" * 32


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_roles_names_and_a_single_token(tmp_path: Path) -> None:
    text = f"# who may act\noperate {OPERATE} anna@host\n\nview {VIEW}\n"
    tokens = TokenFile(str(write(tmp_path / "t", text)))
    anna, view = tokens.find(OPERATE), tokens.find(VIEW)
    assert anna is not None
    assert view is not None
    assert (anna.role, anna.name, view.role, view.name) == ("operate", "anna@host", "view", "view-4")
    for wrong in ("", "o", OPERATE[:-1], f"{OPERATE} ", "é" * 32, "\udcff"):
        assert tokens.find(wrong) is None
    only = TokenFile(str(write(tmp_path / "one", f"{VIEW}\n"))).find(VIEW)
    assert only is not None
    assert only.role == "operate"
    assert VIEW not in redact(f"a log line with {VIEW}")


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 0o600, "is empty"),
        ("# none\n", 0o600, "is empty"),
        (OPERATE, 0o640, "can be used by others \\(mode 0640\\)"),
        (OPERATE, 0o604, "can be used by others"),
        ("short", 0o600, "line 1 that is shorter than 16"),
        (f"operate {OPERATE}\nadmin {VIEW}", 0o600, "no role and token in line 2"),
        (f"operate {OPERATE} a name", 0o600, "no role and token in line 1"),
        (f"operate {OPERATE} na<me", 0o600, "a name in line 1"),
        (f"operate {OPERATE}\nview {OPERATE}", 0o600, "has a token twice"),
        (f"operate {OPERATE}\n" + "#" * 70_000, 0o600, "larger than 64 KiB"),
    ],
)
def test_what_is_refused_names_no_token(tmp_path: Path, text: str, mode: int, why: str) -> None:
    with pytest.raises(InvalidConfigError, match=why) as refused:
        TokenFile(str(write(tmp_path / "t", text, mode))).tokens()
    assert OPERATE not in str(refused.value)
    assert OPERATE not in refused.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a file of root")
def test_a_secret_of_a_pod_is_read_by_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t", OPERATE, 0o440)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert TokenFile(str(path)).find(OPERATE) is not None
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(InvalidConfigError, match="can be used by others"):
            TokenFile(str(path)).tokens()


def test_a_folder_a_missing_file_and_one_of_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff" * 40)
    (tmp_path / "bytes").chmod(0o600)
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), (tmp_path / "bytes", "text")):
        with pytest.raises(InvalidConfigError, match=why):
            TokenFile(str(path)).tokens()


def test_it_is_read_again_and_a_bad_change_lets_nobody_in(tmp_path: Path) -> None:
    tokens = TokenFile(str(write(tmp_path / "t", OPERATE)))
    assert tokens.find(OPERATE) is not None
    write(tmp_path / "new", VIEW)
    os.replace(tmp_path / "new", tmp_path / "t")
    assert tokens.find(OPERATE) is None
    assert tokens.find(VIEW) is not None
    (tmp_path / "t").chmod(0o644)
    with pytest.raises(InvalidConfigError, match="others"):
        tokens.find(VIEW)
    (tmp_path / "t").unlink()
    with pytest.raises(InvalidConfigError, match="No such file"):
        tokens.find(VIEW)


def test_the_credential_of_systemd_is_found_and_its_mode_is_systemds(tmp_path: Path) -> None:
    assert token_file_of(HttpConfig(), {}) is None
    assert token_file_of(HttpConfig(), {"CREDENTIALS_DIRECTORY": str(tmp_path)}) is None
    write(tmp_path / "http-token", OPERATE, 0o440)
    found = token_file_of(HttpConfig(), {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert found is not None
    assert found.find(OPERATE) is not None
    named = token_file_of(HttpConfig(token_file=str(tmp_path / "http-token")), {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert named is not None
    assert named.find(OPERATE) is not None
