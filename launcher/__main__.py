"""`python -m launcher` is the `prfaas` command; the supervisor starts its children this way."""

from __future__ import annotations

from launcher.cli import main

main()
