"""A stranger's checkpoint runs none of its code: an audit hook looks at what is unpickled."""

import json
import os
import pickle
import subprocess
import sys
import zipfile

import pytest

from megaasync.checkpoint.paths import MARK, META, checksum, inspect_checkpoint
from megaasync.checkpoint.storage import PICKLED, TENSORS, read_metadata
from megaasync.config import ConfigError
from megaasync.observe.run_files import write_json
from tests.support.cli import TINY, environment, pretrain

RUN = [*TINY, "checkpoint.interval=2", "train.steps=2", "train.lr_schedule=constant", "model.num_layers=2"]


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("made")
    assert (ran := pretrain(*RUN, "run.dir=run", cwd=cwd)).status == 0, ran.err
    return cwd / "run"


@pytest.fixture
def checkpoint(made, tmp_path):
    import shutil

    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run/checkpoints/step_00000002"


def sign(folder):
    """Give a folder the mark that goes with its files, as whoever forges a checkpoint would."""
    names = [path.name for path in folder.iterdir() if path.name != MARK]
    files = {name: {"size": (folder / name).stat().st_size, "crc32": checksum(folder / name)} for name in names}
    write_json(folder / MARK, {"files": files})
    assert inspect_checkpoint(folder).is_complete


def resumed_under_audit(checkpoint, tmp_path, *arguments):
    """(the run, every global that its process unpickled from the moment it looked at the checkpoint)."""
    program = """
import sys
found = []
def hook(event, arguments):
    if event == "pickle.find_class":
        found.append(".".join(map(str, arguments)))
from megaasync.train import worker
from megaasync.distributed.environment import RankEnvironment
import megaasync.pretrain as program
program.spawn_ranks = lambda target, arguments, **_: [target(RankEnvironment(0, 1, 0, 1, ""), *arguments)]
sys.addaudithook(hook)
try:
    program.main()
finally:
    print("UNPICKLED", sorted(set(found)), flush=True)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, *RUN, *arguments, "train.steps=3", f"checkpoint.resume={checkpoint}",
         "run.dir=next"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("UNPICKLED")]
    assert lines, ran.stderr
    return ran, lines[-1]


def test_nothing_is_unpickled_on_a_resume(checkpoint, tmp_path):
    """torch's own file may hold anything: it is not read."""
    (checkpoint / PICKLED).write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    sign(checkpoint)
    ran, unpickled = resumed_under_audit(checkpoint, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert unpickled == "UNPICKLED []" and not (tmp_path / "ran").exists()


def test_a_hostile_index_of_an_old_checkpoint_is_refused(checkpoint, tmp_path):
    (checkpoint / TENSORS).unlink()
    (checkpoint / PICKLED).write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    sign(checkpoint)
    ran, unpickled = resumed_under_audit(checkpoint, tmp_path)
    assert ran.returncode == 2 and "posix.system, which no checkpoint needs" in ran.stderr, ran.stderr
    assert "nothing of it was run" in ran.stderr
    assert unpickled == "UNPICKLED []" and not (tmp_path / "ran").exists()


def test_a_hostile_tensor_is_refused(checkpoint, tmp_path):
    """Tensors are pickles too, in a zip file: torch reads them with weights_only."""
    index = json.loads((checkpoint / TENSORS).read_text())
    for tensor in index["tensors"].values():
        for chunk in tensor["chunks"]:
            path = checkpoint / chunk["file"]
            with path.open("r+b") as file:
                file.seek(chunk["start"])
                with zipfile.ZipFile(checkpoint / "forged", "w") as forged:
                    forged.writestr("archive/data.pkl", pickle.dumps(Hostile(tmp_path / "ran")))
                    forged.writestr("archive/version", "3")
                file.write((checkpoint / "forged").read_bytes()[: chunk["length"]])
    (checkpoint / "forged").unlink()
    sign(checkpoint)
    ran, unpickled = resumed_under_audit(checkpoint, tmp_path)
    assert ran.returncode == 2 and "cannot be read" in ran.stderr, ran.stderr
    assert unpickled == "UNPICKLED []" and not (tmp_path / "ran").exists()


@pytest.mark.slow("survive")
def test_an_old_checkpoint_loads_through_the_classes_that_it_needs(checkpoint, tmp_path):
    expected = read_metadata(checkpoint)
    (checkpoint / TENSORS).unlink()
    sign(checkpoint)
    found = read_metadata(checkpoint)
    assert found.storage_data.keys() == expected.storage_data.keys()
    for name, tensor in expected.state_dict_metadata.items():
        other = found.state_dict_metadata[name]
        assert (tensor.size, tensor.properties.dtype) == (other.size, other.properties.dtype)
        assert tensor.chunks == other.chunks
    for index, place in expected.storage_data.items():
        other = found.storage_data[index]
        assert (place.relative_path, place.offset, place.length) == (other.relative_path, other.offset, other.length)
    ran, unpickled = resumed_under_audit(checkpoint, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "torch.distributed.checkpoint.metadata.Metadata" in unpickled and "posix" not in unpickled


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x.distcp", "a/b.distcp", "x.json", 7])
def test_an_index_leads_to_no_file_outside_of_its_folder(checkpoint, name):
    index = json.loads((checkpoint / TENSORS).read_text())
    next(iter(index["tensors"].values()))["chunks"][0]["file"] = name
    (checkpoint / TENSORS).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"tensors\.json cannot be read .*is no file of a checkpoint"):
        read_metadata(checkpoint)


def test_an_index_with_a_part_missing_is_refused(checkpoint):
    """Else the tensor would keep what it was initialised with."""
    whole = (checkpoint / TENSORS).read_text()
    for change in (lambda item: item["chunks"].clear(), lambda item: item["chunks"][0].update(sizes=[10**6])):
        index = json.loads(whole)
        change(index["tensors"]["master/layers.0.attention.query.weight"])
        (checkpoint / TENSORS).write_text(json.dumps(index))
        with pytest.raises(ConfigError, match=r"the parts of master/layers\.0\.attention\.query\.weight are not"):
            read_metadata(checkpoint)


def test_torchs_own_reader_still_reads_what_is_written(checkpoint):
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert {"master/layers.0.attention.query.weight", "gradient/1/layers.0.attention.query.weight"} <= metadata.keys()


@pytest.mark.slow("survive")
def test_files_and_folders_have_the_modes_that_the_umask_leaves(tmp_path):
    ran = subprocess.run(
        ["bash", "-c", 'umask 022; exec "$@"', "bash", sys.executable, "-m", "megaasync.pretrain", *RUN, "run.dir=run"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "run/checkpoints/step_00000002" / META).exists()
