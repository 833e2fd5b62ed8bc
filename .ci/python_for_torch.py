"""Says in a sentence that PyTorch has no build for this Python or machine, before pip's resolver
says it in a page. Every Python can run it, since it is old ones that have to: no f-strings.

There are the wheels of the release that constraints.txt pins: cp311 to cp314, manylinux_2_28 and
macosx_14_0_arm64.
"""

import platform
import sys
import sysconfig

PYTHONS = (3, 11), (3, 14)  # oldest, newest
MACHINES = ("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")
GLIBC, MACOS = (2, 28), (14,)


def obstacle(python, system, machine, glibc=GLIBC, macos=MACOS, musl=False, bits=64):
    """Return the sentence; None where there is a build. python, glibc, macos: versions, (3, 12).
    system, machine: as `uname -sm` says. bits: of a pointer."""
    there = "PyTorch has builds for {}, and this is {}".format
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        return there("Python {} to {}".format(*map(dotted, PYTHONS)), dotted(python))
    if system == "Windows":
        return "pentameter runs on Linux and macOS; on Windows start it inside WSL 2: wsl --install"
    if (system, machine) == ("Darwin", "x86_64"):
        return there("Macs with Apple Silicon", "a Python for Intel's; there is one for arm64")
    if (system, machine) not in MACHINES or bits != 64:
        known = "64-bit Linux on x86-64 and ARM, and macOS on Apple Silicon"
        return there(known, "{}-bit {} on {}".format(bits, system, machine))  # noqa: UP032
    for old, name, oldest, version in (
        (system == "Linux" and (musl or glibc < GLIBC), "glibc", GLIBC, glibc),
        (system == "Darwin" and macos < MACOS, "macOS", MACOS, macos),
    ):
        if old:
            found = "musl (Alpine?)" if musl else dotted(version)
            return there(name + " " + dotted(oldest) + " or newer", found)
    return None


def dotted(version):
    """Return a version as it is written: "3.12" for (3, 12)."""
    return ".".join(map(str, version))


def numbers(text):
    """Return a version as numbers: (3, 12) for "3.12"."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


if __name__ == "__main__":
    libc, libc_version = platform.libc_ver()
    found = obstacle(
        sys.version_info[:2],
        platform.system(),
        platform.machine(),
        glibc=numbers(libc_version) if libc == "glibc" else GLIBC,
        macos=numbers(platform.mac_ver()[0]),
        musl="musl" in str(sysconfig.get_config_var("SOABI")),
        bits=64 if sys.maxsize > 2**32 else 32,
    )
    if found:
        sys.exit(found + ".\nName another Python: make PYTHON=/path/to/python3.12")
