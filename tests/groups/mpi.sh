#!/bin/sh
# Open MPI, by root's apt-get, and a Horovod with MPI in .venv/mpi, where only its tests see it. Without Open MPI they are skipped,
# and say why. The wheel comes from the cache, if it was built before.
if ! { command -v mpicxx && command -v mpirun; } > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update > /dev/null && apt-get -qq install -y --no-install-recommends libopenmpi-dev openmpi-bin > /dev/null
fi
if ! { command -v mpicxx && command -v mpirun; } > /dev/null; then
    echo "Open MPI cannot be installed here: its tests are skipped"
    exit 0
fi
rm -rf .venv/mpi .venv/mpi-wheel
python -m trainkit horovod wheel --mpi --out .venv/mpi-wheel \
    && python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/mpi .venv/mpi-wheel/*.whl
