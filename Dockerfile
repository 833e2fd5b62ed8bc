# pentameter in a container. A run folder is kept by a volume:
#   docker build -t pentameter .
#   docker run --rm -v "$PWD:/work" pentameter train quickstart
# Limits (--cpus 1.5, --memory 4g) are seen: so many threads, and a run that fits. What answers over
# HTTP listens inside the container on 127.0.0.1 alone, which no port reaches. Opened by --host, let
# the host's own address in and no other, or have `serve` ask for a key (-e PENTAMETER_API_KEY=…):
#   docker run --rm -v "$PWD:/work" -p 127.0.0.1:8000:8000 pentameter serve runs/quickstart --host 0.0.0.0
#   docker run --rm -v "$PWD:/work" -p 127.0.0.1:8001:8001 pentameter watch runs --host 0.0.0.0
# For GPUs, PyTorch's index of that platform: --build-arg TORCH_INDEX=… ; and docker run --gpus all.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# The index of PyTorch's builds for CPUs, as its makers document; empty takes pip's own.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# What `pip install "pentameter[…]"` adds; empty takes pentameter alone.
ARG EXTRAS=serve,tensorboard,wandb,parquet,remote,hub,zstd
# g++ compiles the fused CPU step; without it training is PyTorch's own.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt \
      ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && pip install --no-cache-dir -c /tmp/constraints.txt \
      "$(echo /tmp/wheels/*.whl)${EXTRAS:+[$EXTRAS]}" \
 && rm -rf /tmp/wheels /tmp/constraints.txt
# A user of its own; with `-v` give yours, `--user "$(id -u):$(id -g)"`, to own what is written.
RUN useradd --create-home --uid 1000 pentameter && mkdir /work && chown pentameter /work
USER pentameter
# Whoever runs it may have neither a home nor a name: caches are in /tmp.
ENV XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/cache/matplotlib USER=pentameter
WORKDIR /work
ENTRYPOINT ["pentameter"]
CMD ["--help"]
