# titan_rl on CPUs, as `make install` makes it. From the root of a checkout:
#   docker build -f docker/cpu.Dockerfile -t titan-rl:cpu .
#   docker run --rm -it --shm-size 4g -v "$PWD/runs:/home/titan/work/runs" titan-rl:cpu train quickstart --training.steps 20
FROM python:3.12-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# bubblewrap and libseccomp2: the sandbox; g++: Triton's and torch's compilers; libnuma1, libgomp1: vLLM on CPUs
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap libseccomp2 make g++ libnuma1 libgomp1 git \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 titan && install -d -o titan /home/titan/work
WORKDIR /opt/titan_rl
COPY --chown=titan:titan . .
RUN chown titan:titan /opt/titan_rl
USER 1000
RUN make install MODE=cpu && rm -rf /home/titan/.cache
ENV PATH="/opt/titan_rl/.venv/bin:$PATH"
WORKDIR /home/titan/work
ENTRYPOINT ["titan-rl"]
CMD ["--help"]
