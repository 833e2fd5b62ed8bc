# pentameter in a container. A run folder is kept by a volume:
#   docker build -t pentameter .
#   docker run --rm -v "$PWD:/work" pentameter train quickstart
# For GPUs, PyTorch's index of that platform: --build-arg TORCH_INDEX=… ; and docker run --gpus all.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# The index of PyTorch's builds for CPUs, as its makers document; empty takes pip's own.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# g++ compiles the fused CPU step; without it training is PyTorch's own.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt \
      ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && pip install --no-cache-dir -c /tmp/constraints.txt /tmp/wheels/*.whl \
 && rm -rf /tmp/wheels /tmp/constraints.txt
# A user of its own; with `-v` give yours, `--user "$(id -u):$(id -g)"`, to own what is written.
RUN useradd --create-home --uid 1000 pentameter && mkdir /work && chown pentameter /work
USER pentameter
ENV XDG_CACHE_HOME=/tmp/cache
WORKDIR /work
ENTRYPOINT ["pentameter"]
CMD ["--help"]
