from __future__ import annotations

from pathlib import Path

import pytest

from allhands import settings
from allhands.errors import AllhandsError, ArgumentError, ConnectError
from allhands.settings import LAUNCHER_TABLE, TABLE, Settings, read

SECRET = "open-sesame-7391"
# Read by the environment of allhands' own launcher, because they identify the process.
LAUNCHER = {
    "ALLHANDS_RANK",
    "ALLHANDS_WORLD_SIZE",
    "ALLHANDS_LOCAL_RANK",
    "ALLHANDS_LOCAL_WORLD_SIZE",
    "ALLHANDS_NODE_RANK",
    "ALLHANDS_COORDINATOR",
    "ALLHANDS_RESTART",
}


def token_file(folder: Path, contents: bytes, mode: int = 0o600) -> Path:
    """Write a token file."""
    path = folder / "token"
    path.write_bytes(contents)
    path.chmod(mode)
    return path


def test_tables_list_every_variable() -> None:
    """The tables are the settings and the launcher's variables: exactly the variables that are read."""
    assert set(TABLE) | set(LAUNCHER_TABLE) == {f"ALLHANDS_{field.upper()}" for field in Settings._fields} | LAUNCHER
    assert not set(TABLE) & set(LAUNCHER_TABLE)
    assert set(LAUNCHER_TABLE) >= LAUNCHER
    assert all(TABLE.values())
    assert all(LAUNCHER_TABLE.values())


def test_nothing_set_gives_the_defaults() -> None:
    """An empty environment, and empty variables, give the defaults."""
    assert read({}) == Settings()
    assert read(dict.fromkeys(TABLE, "")) == Settings()
    assert read(dict.fromkeys(TABLE, "  ")) == Settings()


def test_values_are_typed() -> None:
    """Each variable arrives as the type of its field."""
    found = read(
        {
            "ALLHANDS_TOKEN": SECRET,
            "ALLHANDS_JOB": " night ",
            "ALLHANDS_ATTEMPT": "2",
            "ALLHANDS_BIND": "10.0.0.2",
            "ALLHANDS_DESTROY_TIMEOUT": "0.5",
            "ALLHANDS_MIXED_VERSIONS": "1",
            "ALLHANDS_ENGINE": "gloo",
        }
    )
    assert found == Settings(
        token=SECRET,
        job="night",
        attempt=2,
        bind="10.0.0.2",
        destroy_timeout=0.5,
        mixed_versions=True,
        engine="gloo",
    )


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("yes", True), ("0", False), ("False", False), ("no", False)]
)
def test_switches(text: str, value: bool) -> None:
    """0, false and no switch off; anything else switches on."""
    assert read({"ALLHANDS_MIXED_VERSIONS": text}).mixed_versions is value


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the process's own environment is read."""
    monkeypatch.setenv("ALLHANDS_JOB", "from-the-process")
    assert read().job == "from-the-process"


@pytest.mark.parametrize(
    ("name", "text"), [("ALLHANDS_ATTEMPT", "two"), ("ALLHANDS_ATTEMPT", "1.5"), ("ALLHANDS_DESTROY_TIMEOUT", "5s")]
)
def test_bad_number_is_named(name: str, text: str) -> None:
    """A variable that is not a number is an argument error that names it and its value, and no secret."""
    with pytest.raises(ArgumentError) as caught:
        read({name: text, "ALLHANDS_TOKEN": SECRET})
    assert caught.value.slug == "invalid-argument"
    assert name in str(caught.value)
    assert text in str(caught.value)
    assert SECRET not in str(caught.value)


def test_secret_is_not_shown() -> None:
    """A log line or traceback that prints the settings does not print the token."""
    found = read({"ALLHANDS_TOKEN": SECRET})
    assert SECRET not in repr(found)
    assert SECRET not in str(found)


def test_token_wins_over_its_file(tmp_path: Path) -> None:
    """Where both are given, the token itself is used and the file is not opened."""
    assert Settings(token=SECRET, token_file=str(tmp_path / "absent")).secret() == SECRET.encode()


def test_no_token_is_no_secret() -> None:
    """Without a token there is an empty secret, not an error."""
    assert Settings().secret() == b""


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_token_file_is_read(tmp_path: Path, mode: int) -> None:
    """A file that only its owner can read gives the secret, without the newline at its end."""
    path = token_file(tmp_path, f"{SECRET}\n".encode(), mode)
    assert read({"ALLHANDS_TOKEN_FILE": str(path)}).secret() == SECRET.encode()


def refusal(path: Path) -> AllhandsError:
    """Return the error that reading the token file raises."""
    with pytest.raises(ConnectError) as caught:
        Settings(token_file=str(path)).secret()
    assert caught.value.slug == "not-authorised"
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620])
def test_token_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """A token file that is open to others protects nothing: it is refused with its mode and the remedy."""
    found = refusal(token_file(tmp_path, SECRET.encode(), mode))
    assert f"{mode:04o}" in str(found)
    assert "chmod 600" in str(found)


@pytest.mark.parametrize("contents", [b"", b"\n", b"  \n"])
def test_empty_token_file_is_refused(tmp_path: Path, contents: bytes) -> None:
    """An empty token file does not silently mean "no token"."""
    assert "is empty" in str(refusal(token_file(tmp_path, contents)))


def test_absent_token_file_is_refused(tmp_path: Path) -> None:
    """A token file that does not exist is an error that states it."""
    found = refusal(tmp_path / "absent")
    assert "No such file" in str(found)
    assert isinstance(found.__cause__, OSError)


def test_settings_do_not_change() -> None:
    """Settings are read once and stay as they are."""
    with pytest.raises(AttributeError):
        read({}).token = "x"  # type: ignore[misc]  # that is the point
    assert settings.__all__ == ["LAUNCHER_TABLE", "TABLE", "Settings", "read"]
