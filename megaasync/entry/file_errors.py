"""What to say about a file that could not be read or written: what it was for, and which key or variable moves it."""

import errno
import re

# (pattern of the path, what it is, what moves it elsewhere)
_PLACES = (
    (r"/checkpoints/\.?(step|damaged|abandoned)_", "a checkpoint", "run.dir"),
    (
        r"/(metrics\.jsonl|\.?(config|plan|summary|report|trace|environment|tokenizer)\.[^/]*|\.(launcher|ranks)\.lock)$",
        "of the run folder",
        "run.dir",
    ),
    (r"/(tokens-[0-9a-f]{20}|tokenizer-[0-9a-f]{20}|hashes)", "of the data cache", "data.cache_dir"),
    (r"\.(bin|idx)$", "of the token files", "data.path"),
    (r"/megaasync-[^/]*/|/listener-|/pymp-", "for the ranks to meet", "the variable TMPDIR"),
)
_REMEDIES = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "make room there (disk, quota, ulimit -f){move}",
    (errno.EACCES, errno.EPERM, errno.EROFS): "get the right to read and write it{move}",
    (errno.ENOENT, errno.ENOTDIR, errno.ESTALE): "it was renamed or removed; bring it back{move}",
    (errno.EMFILE, errno.ENFILE): "this process may not open more files; raise the limit (ulimit -n)",
    (errno.ENOLCK, errno.EOPNOTSUPP): "its file system has no locks{move}",
    (errno.EIO,): "its disk or file system is at fault; ask who runs it{move}",
    (errno.ENAMETOOLONG,): "its path is too long{move}",
}


def explain_file_error(error: OSError) -> str:
    """One line about a file: which, what for, what went wrong, and what can be done.

    Args:
        error: as the operating system gave it.
    """
    name = str(error.filename) if error.filename else ""
    reason = error.strerror or str(error) or type(error).__name__
    if "AF_UNIX path too long" in str(error):
        return f"a socket for the ranks to meet: {reason}; set the variable TMPDIR to a shorter path"
    what, key = next(((what, key) for pattern, what, key in _PLACES if re.search(pattern, name)), ("", ""))
    move = f", or choose another place ({key})" if key else ""
    remedy = next((text for numbers, text in _REMEDIES.items() if error.errno in numbers), "look at it{move}")
    subject = f"{name} ({what})" if what else name or "a file or stream"
    return f"{subject}: {reason}; {remedy.format(move=move)}"
