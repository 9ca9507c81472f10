#!/bin/sh
# Remove files that are not read at run time from the environment $1, then compile the rest.
set -eu
cd "$1"
find . \( -name tests -o -name test -o -name __pycache__ \) -type d -prune -exec rm -rf {} +
find . -type f \( -name '*.pyx' -o -name '*.pxd' -o -name '*.c' -o -name '*.h' -o -name '*.a' -o -name '*.pyi' \) -exec rm -f {} +
rm -rf lib/python3*/site-packages/numpy/f2py lib/python3*/site-packages/numpy/distutils
find bin -type f ! -name 'python*' -exec rm -f {} +
# Debugger symbols are most of the size of some extensions. Wheels with libraries of their own were already changed by
# patchelf, and strip may break them. They are left as they are.
if command -v strip >/dev/null; then
  find lib -name '*.so' ! -path '*/numpy/*' ! -path '*.libs/*' -exec strip --strip-unneeded {} +
fi
bin/python -m compileall -q --invalidation-mode unchecked-hash lib >/dev/null || true
