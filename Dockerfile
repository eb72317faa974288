# CPU:   docker build --target cpu -t quantkit .
# CUDA:  docker build --target cuda -t quantkit:cuda .      (torch brings CUDA's libraries; the host needs the driver and NVIDIA's container toolkit)
# Run:   docker run --rm -v "$PWD:/models" -p 127.0.0.1:8000:8000 quantkit serve /models/qwen-awq --host 0.0.0.0 --api-key KEY
# No image was built where this was written, as base images cannot be pulled there. The steps of the CPU stages, by root and then as the user, were run
# in a Debian 12 root made by debootstrap, up to `quantkit run tiny-r1`, with kernels compiled there; the CUDA stage was not. hadolint 2.15.1: no finding.
FROM debian:bookworm-slim AS python
# g++ compiles the kernels of the processor that it finds, once, into the user's cache.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM python AS wheel
COPY . /source
WORKDIR /source
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir hatchling==1.27.0 \
    && /build/bin/python -m hatchling build --target wheel -d /dist \
    && cp constraints.txt /dist

FROM python AS installed-cpu
COPY --from=wheel /dist /dist
RUN python3 -m venv /opt/quantkit \
    && /opt/quantkit/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu \
    && /opt/quantkit/bin/pip install --no-cache-dir --constraint /dist/constraints.txt /dist/*.whl

FROM python AS installed-cuda
COPY --from=wheel /dist /dist
RUN python3 -m venv /opt/quantkit \
    && /opt/quantkit/bin/pip install --no-cache-dir --constraint /dist/constraints.txt /dist/*.whl

FROM python AS runtime
RUN useradd --create-home --uid 10001 quantkit
ENV PATH=/opt/quantkit/bin:$PATH
USER 10001
WORKDIR /models
EXPOSE 8000
ENTRYPOINT ["quantkit"]
CMD ["--help"]

FROM runtime AS cuda
COPY --from=installed-cuda /opt/quantkit /opt/quantkit

FROM runtime AS cpu
COPY --from=installed-cpu /opt/quantkit /opt/quantkit
