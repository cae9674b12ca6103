#!/bin/sh
# Installs the service into a virtual environment: install.sh TARGET [TORCH_INDEX_URL]. Run in the repository's root.
set -eu
target=$1
torch_index=${2:-}
python3 -m venv "$target"
if [ -n "$torch_index" ]; then
    # That index holds few other packages; what torch needs comes with the service.
    "$target/bin/pip" install --no-cache-dir -c constraints.txt --index-url "$torch_index" --no-deps torch
fi
"$target/bin/pip" install --no-cache-dir -c constraints.txt .
"$target/bin/prophetkv" --version
