"""Certificates for the tests of TLS, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["made", "tls"]


def made(folder: Path) -> Path:
    """Make an authority, a certificate of it for 127.0.0.1, and another authority that signed nothing."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command is not installed")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    for name in ("ca", "other"):
        run(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name} of the tests")
    for name, host in (("cert", "IP:127.0.0.1"), ("elsewhere", "DNS:node-a")):
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", f"subjectAltName={host}"]
        extra = ["-addext", "basicConstraints=critical,CA:FALSE"]
        run(*new, *signed, *extra, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    return folder


def tls(folder: Path, cert: str = "cert", ca: str = "ca") -> dict[str, str]:
    """Return the settings of a job with TLS."""
    return {
        "ALLHANDS_TLS_CERT": str(folder / f"{cert}.pem"),
        "ALLHANDS_TLS_KEY": str(folder / f"{cert}.key"),
        "ALLHANDS_TLS_CA": str(folder / f"{ca}.pem"),
    }
