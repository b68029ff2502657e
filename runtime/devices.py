"""How many devices there are, and what they are.

`ensure_devices(count)` starts JAX with enough devices (virtual ones on a machine without accelerators);
`detect_hardware()` names the hardware profile that fits, asking JAX in a child process so that the caller
(planning never imports JAX) does not start it. Processes of one program: not here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from ..program import UserError

# JAX counts devices once, when it starts: a second, larger mesh in the same process must find its devices there.
FEWEST_VIRTUAL_DEVICES = 8

ASK = "import jax; d = jax.devices(); print('devices', d[0].platform, len(d), d[0].device_kind, sep='\\t')"

# What JAX calls a device -> the profile (extract/profiles/<name>.toml).
PROFILES = (
    (r"H200", "h200"),
    (r"H100", "h100"),
    (r"A100", "a100"),
    (r"TPU v5 ?(lite|e)", "tpu-v5e"),
)


def flagged_devices() -> int:
    """How many virtual devices the environment's XLA_FLAGS ask for; 0 if they say nothing."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 0


def ensure_devices(count: int) -> str:
    """Have JAX run with at least `count` devices; says which they are."""
    import jax

    try:
        if jax.config.values["jax_num_cpu_devices"] < count:  # -1 unless set; comes before XLA_FLAGS
            jax.config.update("jax_num_cpu_devices", max(count, flagged_devices(), FEWEST_VIRTUAL_DEVICES))
    except RuntimeError:  # JAX is already running
        pass
    devices = jax.devices()
    kind = devices[0].platform
    if len(devices) < count:
        remedy = " (JAX was already running: ask for the devices first)" if kind == "cpu" else ""
        raise UserError(f"devices: {count} needed, found {len(devices)} of kind {kind}{remedy}")
    return f"{count} virtual CPU devices" if kind == "cpu" else f"{count} of {len(devices)} {kind} devices"


def detect_hardware(timeout_seconds: float = 60) -> str:
    """The profile's name for the devices JAX finds; "cpu" where it finds no accelerator or none known."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=timeout_seconds, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return "cpu"
    return profile_name(answer)


def profile_name(answer: str) -> str:
    for line in answer.splitlines():
        if line.startswith("devices\t"):
            _, platform, _, kind = line.split("\t")
            found = [name for pattern, name in PROFILES if re.search(pattern, kind)]
            return found[0] if found and platform != "cpu" else "cpu"
    return "cpu"
