"""Ceph RADOS Gateway 16.2, an S3 server: Debian 12's packages, one monitor, one OSD in memory; no root, no systemd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import boto3

from tests.support.servers import RealStore, UnavailableError, cache, may_fetch, process, run

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "testaccess", "testsecret12345", "us-east-1", "test"
_PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
_PYTHON = "/usr/bin/python3"  # the system's own, for which the packages' modules are built
_CONFIG = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = v1:127.0.0.1:{monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv4 = true
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
keyring = {folder}/keyring
run dir = {folder}/run
crash dir = {folder}/run
admin socket =
pid file =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
plugin dir = {libraries}/ceph
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 0
mon data avail warn = 0
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 2147483648
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
[client.rgw.a]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable apis = s3, admin
"""


def start(folder: Path) -> Iterator[RealStore]:
    """Start all three on free ports, with an empty bucket; everything that they write is in ``folder``."""
    root = _packages(folder)
    libraries = next(iter(root.glob("usr/lib/*-linux-gnu")))
    monitor, port = _free_ports(2)
    for name in ("mon", "osd", "run", "rgw"):
        (folder / name).mkdir()
    config = folder / "ceph.conf"
    fsid = uuid.uuid4()
    config.write_text(_CONFIG.format(fsid=fsid, folder=folder, monitor=monitor, port=port, libraries=libraries))
    log = folder / "start.log"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{root}/lib/{libraries.name}",
        "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",
        "CEPH_CONF": str(config),
    }

    def ceph(name: str, *arguments: str | Path, timeout: float = 60) -> None:
        run(root / "usr/bin" / name, *arguments, log=log, env=environment, timeout=timeout)

    keyring, monmap = folder / "keyring", folder / "monmap"
    ceph("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    caps = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
    ceph("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *caps)
    there = f"[v1:127.0.0.1:{monitor}]"
    ceph("monmaptool", "--create", "--clobber", "--addv", "a", there, "--fsid", str(fsid), monmap)
    ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    with contextlib.ExitStack() as running:

        def begin(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = (root / "usr/bin" / name, "-f", *arguments)
            return running.enter_context(process(*command, log=folder / f"{name}.out", env=environment))

        begin("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        # Waits for the monitor.
        run(_PYTHON, root / "usr/bin/ceph", "osd", "new", osd, log=log, env=environment, timeout=60)
        ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        for attempt in range(1, 6):
            if _is_up(begin("ceph-osd", "-i", "0"), folder / "osd.0.log", attempt):
                break
        else:
            raise UnavailableError(f"The OSD did not start: {(folder / 'ceph-osd.out').read_text()[-1000:]}")
        user = ("--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        ceph("radosgw-admin", "user", "create", *user, timeout=120)
        gateway = begin("radosgw", "-n", "client.rgw.a")
        endpoint = f"http://127.0.0.1:{port}"
        _wait_for(gateway, port, folder)
        # Named, so that no profile of this machine has a say.
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": REGION}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=BUCKET)
        yield RealStore(
            f"s3://{BUCKET}",
            {
                "aws_endpoint": endpoint,
                "aws_access_key_id": ACCESS_KEY,
                "aws_secret_access_key": SECRET_KEY,
                "aws_region": REGION,
                "allow_http": "true",
            },
        )


def _is_up(osd: subprocess.Popen[bytes], log: Path, attempt: int) -> bool:
    """False where it ended: its first words to the monitor may come before it knows the cluster's id ("wrong fsid")."""
    deadline = time.monotonic() + 60
    while osd.poll() is None and time.monotonic() < deadline:
        text = log.read_text(errors="replace") if log.exists() else ""
        if "booting -> active" in text:
            return True
        if text.count("unable to update_crush_device_class") >= attempt:
            osd.terminate()
            osd.wait(10)
            return False
        time.sleep(0.1)
    return False


def _wait_for(gateway: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if gateway.poll() is not None or time.monotonic() > deadline:
            raise UnavailableError(f"The gateway did not start: {(folder / 'radosgw.out').read_text()[-1000:]}")
        time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _packages(folder: Path) -> Path:
    """The folder below which the packages are unpacked, or ``/`` where the system has them."""
    if all(Path("/usr/bin", name).exists() for name in ("ceph-mon", "ceph-osd", "radosgw", "ceph")):
        return Path("/")
    home = cache() / "ceph-16.2"
    root = home / "root"
    if not (home / "complete").exists():
        may_fetch("Ceph RADOS Gateway 16.2")
        if shutil.which("apt-get") is None or platform.freedesktop_os_release().get("VERSION_ID") != "12":
            raise UnavailableError("Ceph RADOS Gateway is unpacked from the packages of Debian 12, which this is not")
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (home / "complete").exists():
                _fetch(home, root, folder / "fetch.log")
                (home / "complete").touch()
    return root


def _fetch(home: Path, root: Path, log: Path) -> None:
    """Unpack the packages and what they need and the system lacks; nothing is installed."""
    plan = ("apt-get", "install", "--simulate", "--no-install-recommends", *_PACKAGES)
    try:
        said = subprocess.run(plan, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"apt-get does not know the packages of Ceph (apt-get update?): {error}") from error
    # "Inst NAME [OLD] (NEW ...)" would be a newer release of what is there.
    names = re.findall(r"^Inst (\S+) \(", said, re.MULTILINE)
    debs = home / "debs"
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir()
    run("apt-get", "download", *names, log=log, cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        run("dpkg-deb", "-x", deb, root, log=log)
    shutil.rmtree(debs)
