"""Programs around the package: `python -m tools.bench...`, `.study...`, `.data...`; installed as `megaasync.tools`.

Imports between them are relative, so that both names work.
"""
