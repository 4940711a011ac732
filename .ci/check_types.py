"""Runs pyright on the product and fails where it finds more errors than the committed number, which only falls."""

import json
import subprocess
import sys
from pathlib import Path

RATCHET = Path(__file__).with_name("pyright_errors")


def main() -> int:
    """Print how many errors there are and how many are allowed; 1 where there are too many."""
    run = subprocess.run(["pyright", "--outputjson"], capture_output=True, text=True, cwd=RATCHET.parents[1])
    report = json.loads(run.stdout)
    found, allowed = report["summary"]["errorCount"], int(RATCHET.read_text())
    print(f"pyright: {found} errors, {allowed} allowed")
    if found > allowed:
        errors = [item for item in report["generalDiagnostics"] if item["severity"] == "error"]
        lines = (f"{e['file']}:{e['range']['start']['line'] + 1}: {e['message'].splitlines()[0]}" for e in errors)
        print("\n".join(lines))
        return 1
    if found < allowed:
        print(f"lower {RATCHET.name} to {found}, so that it stays so")
    return 0


if __name__ == "__main__":
    sys.exit(main())
