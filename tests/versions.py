"""The default tests with other versions of torch and Lightning: `make test-versions VERSIONS="lowest 2.11 newest"`.

Each version has an environment of its own, made before its tests and removed after them. PyPI has some versions of
torch as CUDA builds only: eight gigabytes on disk, which run on CPUs too. Left out: other versions of Python than the
one that runs this.
"""

import argparse
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

ROOT = Path(__file__).parents[1]


def requirements(version: str) -> list[str]:
    """What pip is asked for: "lowest" and "newest" of what we support, or TORCH or TORCH+LIGHTNING.

    Example:
        >>> requirements("lowest")
        ['-c', 'constraints-lowest.txt', 'torch', 'lightning']
        >>> requirements("2.11")
        ['torch==2.11.*', 'lightning']
        >>> requirements("2.11+2.6.1")
        ['torch==2.11.*', 'lightning==2.6.1']
    """
    if version == "lowest":
        return ["-c", "constraints-lowest.txt", "torch", "lightning"]
    if version == "newest":
        return ["--upgrade", "torch", "lightning"]
    torch, _, lightning = version.partition("+")
    exact = torch if torch.count(".") > 1 else f"{torch}.*"
    return [f"torch=={exact}", f"lightning=={lightning}" if lightning else "lightning"]


def tested(version: str, arguments: Sequence[str], keep: bool) -> int:
    """Run the tests with a version; pytest's exit code, or pip's."""
    folder = ROOT / f".venv-{version}"
    python = str(folder / "bin" / "python")
    try:
        venv.create(folder, with_pip=True, clear=True)
        install(python, *requirements(version))
        with NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(pins(python))
            file.flush()
            install(python, "-c", file.name, "-e", ".[dev]")
        print(f"== {version}: {said_by(python)}", flush=True)
        return subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT).returncode
    except subprocess.CalledProcessError as error:
        return error.returncode
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def install(python: str, *arguments: str) -> None:
    """Ask an interpreter's pip.

    Raises:
        CalledProcessError: pip fails.
    """
    subprocess.run([python, "-m", "pip", "install", "-q", *arguments], cwd=ROOT, check=True)


def pins(python: str) -> str:
    """What everything else is held to: the versions under test as they are, the rest as in `constraints.txt`."""
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    lines = frozen.splitlines()
    there = {line.partition("==")[0].lower() for line in lines}
    others = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join([*lines, *(line for line in others if line.partition("==")[0].lower() not in there)])


def said_by(python: str) -> str:
    """The versions that an interpreter has."""
    code = "import sys, torch, lightning; print('Python', sys.version.split()[0], 'torch', torch.__version__, "
    code += "'Lightning', lightning.__version__)"
    return subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help='"lowest", "newest", or versions as 2.11 and 2.11+2.6.1')
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    parser.add_argument("--select", nargs="*", default=[], help="files or folders of tests, in place of all")
    args = parser.parse_args()
    arguments = ["-q", "-n", str(args.jobs), "--dist", "worksteal", "-m", "not slow", *args.select]
    codes = {version: tested(version, arguments, args.keep) for version in args.versions}
    for version, code in codes.items():
        print(f"{version}: {'passed' if code == 0 else f'failed (exit code {code})'}")
    sys.exit(max(codes.values()))


if __name__ == "__main__":
    main()
