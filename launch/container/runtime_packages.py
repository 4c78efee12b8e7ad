"""Print the Debian packages of the libraries that compiled modules call, for the Dockerfile.

    python launch/container/runtime_packages.py DIRECTORY 'PATTERN'

Their names differ between releases (libopencv-core406, libopencv-core406t64); what the linker finds
where the modules were compiled is asked for instead. A library that is missing there, or that no
package has, ends the build.
"""

import subprocess
import sys
from pathlib import Path


def libraries(module: Path) -> list[Path]:
    """The files that the linker would load with a module."""
    lines = subprocess.run(["ldd", module], check=True, capture_output=True, text=True).stdout
    if "not found" in lines:
        sys.exit(f"error: {module}: a library is missing:\n{lines}")
    words = [line.split() for line in lines.splitlines()]
    return [Path(word[2]) for word in words if len(word) > 2 and word[2].startswith("/")]


def package_of(library: Path) -> str:
    """A file may be known to dpkg under /lib or, where that is a link, under /usr/lib."""
    resolved = library.resolve()
    for path in (library, resolved, Path("/") / resolved.relative_to("/usr")):
        found = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    sys.exit(f"error: {library}: belongs to no package")


def main(directory: str, pattern: str) -> None:
    modules = sorted(Path(directory).rglob(pattern))
    called = {library for module in modules for library in libraries(module)}
    own = Path(directory).resolve()
    outside = [library for library in called if not library.resolve().is_relative_to(own)]
    print("\n".join(sorted({package_of(library) for library in outside})))


if __name__ == "__main__":
    main(*sys.argv[1:])
