"""What a host offers to a run, found without torch. Standard library only."""

import fcntl
import os
import re
import resource
import socket
import ssl
import struct
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.errors import ConfigError

_NVIDIA_SMI_SECONDS = 30.0
"""A driver that is still initialising answers within seconds. One that hangs must not block the command line."""

_QUERY = "index,uuid,driver_version,mig.mode.current,memory.total,pci.bus_id"

_SIOCGIFADDR = 0x8915

PCI = Path("/sys/bus/pci/devices")

TLS = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
"""Variables of Monarch's with PEM files: this host's certificate, its key, and the authority that signed those of all
hosts. With them Monarch encrypts what goes between hosts, and each end asks the other for its certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host offers to a run."""

    name: str = "host0"
    """`host0` is the controller's."""
    address: str = ""
    """IP address under which other hosts reach it, and the network interface that has it; empty: there are none."""
    interface: str = ""
    cpus: int
    """CPUs that this process may use."""
    cuda_devices: tuple[int, ...] = ()
    """Device indices as `CUDA_VISIBLE_DEVICES` takes them; empty if that variable hides all of them."""
    device_cores: tuple[str, ...] = ()
    """CPUs of the NUMA node of each, as the kernel lists them (`0-31,64-95`); empty: it does not say."""
    devices_there: int | None = None
    """How many there are, if `cuda_devices` are more for the sake of a drawing."""
    memory: int = 0
    """Bytes available without swapping; 0: unknown."""
    driver: str = ""
    """Version of NVIDIA's driver; empty: none answers."""
    device_memory: int = 0
    """Bytes of the device that has the fewest; 0: unknown."""
    mig: bool = False
    """Whether a device is split into several (MIG)."""
    open_files: int = 0
    """Hard limit of a process; 0: unknown."""


def detect_host(environ: Mapping[str, str] = os.environ, *, name: str = "host0", address: str = "") -> HostFacts:
    """Detect this host's resources without torch: from `/proc`, the scheduler, and `nvidia-smi` if it is installed.
    Raises ConfigError if no network interface of this host has the address."""
    memory = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    listing = _nvidia_smi()
    devices = visible_devices(listing, environ.get("CUDA_VISIBLE_DEVICES"))
    rows = [_rows(listing)[device] for device in devices]
    return HostFacts(
        name=name,
        address=address,
        interface=_interface_of(address) if address else "",
        cpus=len(os.sched_getaffinity(0)),
        cuda_devices=devices,
        device_cores=tuple(_cores_near(row[5]) for row in rows),
        driver=rows[0][2] if rows else "",
        device_memory=min((int(row[4]) << 20 for row in rows if row[4].isdecimal()), default=0),
        mig=any(row[3] == "Enabled" for row in rows),
        memory=int(memory[1]) * 1024 if memory else 0,
        open_files=max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),  # -1: no limit
    )


def visible_devices(listing: str, visible: str | None) -> tuple[int, ...]:
    """Indices of the devices that a process may use, in its order.

    Args:
        listing: a line per device, of what `_QUERY` asks for: `0, GPU-4f…, 580.65.06, Disabled, 81559, 0…0:1A:00.0`.
        visible: `CUDA_VISIBLE_DEVICES`, of indices or (beginnings of) UUIDs; None: not set. As in CUDA itself, the
            first entry that names no device ends the list.
    """
    uuids = {index: uuid for index, (_, uuid, *_) in _rows(listing).items()}
    if visible is None:
        return tuple(uuids)
    devices: list[int] = []
    for entry in filter(None, (entry.strip() for entry in visible.split(","))):
        named = [index for index, uuid in uuids.items() if entry == str(index) or uuid.startswith(entry)]
        if len(named) != 1 or named[0] in devices:
            break
        devices.append(named[0])
    return tuple(devices)


def _rows(listing: str) -> dict[int, list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    return {int(row[0]): row for row in rows if len(row) == _QUERY.count(",") + 1 and row[0].isdecimal()}


def _nvidia_smi() -> str:
    """What `nvidia-smi` answers to `_QUERY`; empty if no driver answers, so that no device can be used."""
    try:
        question = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        result = subprocess.run(question, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _cores_near(bus: str) -> str:
    with suppress(OSError):  # the driver's name of a bus has four digits more
        return (PCI / bus.lower()[4:] / "local_cpulist").read_text().strip()
    return ""


def _interface_of(address: str) -> str:
    """Name of the network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise ConfigError(
        f"no network interface of {socket.gethostname()} has {address} as its first address: name one that the host "
        "itself knows, no secondary one and none of a router in front of it"
    )


def address_towards(peer: str) -> str:
    """This host's IP address on the way to a peer (ADDRESS:PORT). Raises ConfigError: there is no way."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing
        except OSError as error:
            raise ConfigError(f"{peer} cannot be reached: {error.strerror or error}") from error
        return str(probe.getsockname()[0])


def transport(untrusted: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> str:
    """How Monarch connects hosts: `tls` if the variables of `TLS` are there, else `tcp`. `untrusted`: addresses on
    networks which nobody said to trust. Raises ConfigError: these would be open to everybody; or only some variables
    are set, or a file is of no use."""
    files = [environ.get(name, "") for name in TLS]
    if not any(files):
        if untrusted:
            raise ConfigError(
                f"cannot use {', '.join(untrusted)} without --trusted-network: whoever reaches a port there can run "
                f"any code; say it if only people whom you trust can, or use TLS ({', '.join(TLS)})"
            )
        return "tcp"
    if not all(files):
        missing = ", ".join(name for name, file in zip(TLS, files, strict=True) if not file)
        raise ConfigError(f"TLS needs {', '.join(TLS)}, and {missing} is not set: set all three, or none")
    try:
        for file in files:
            open(file).close()  # ssl's own error does not name it
        ssl.create_default_context(cafile=files[2]).load_cert_chain(files[0], files[1], password="")
    except OSError as error:
        raise ConfigError(f"{', '.join(TLS)} are of no use: {error}") from error
    return "tls"
