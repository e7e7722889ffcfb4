"""What a measurement ran on, in words, and at which commit."""

import os
import platform
import subprocess

import torch


def hardware() -> str:
    """Return processor, cores and torch's version."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{os.cpu_count()} CPU cores ({platform.machine()}, {capability}), torch {torch.__version__}"


def commit() -> str:
    """Return the commit that runs, marked when the tree has changes; "unknown" outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changes.stdout.strip() else "")
