# The service and the commands: docs/running.md#images.
#
#     docker build --tag mapstate .
#     docker run --rm --no-healthcheck -e MAPSTATE_URL mapstate ls
#     docker run -p 8080:8080 -e MAPSTATE_URL -e MAPSTATE_TOKEN --read-only mapstate
ARG PYTHON=python:3.13-slim-bookworm

FROM ${PYTHON} AS build
ARG EXTRAS=aerospike,aws,azure,cli,gcp,redis,serve,sketches
WORKDIR /build
COPY . .
# pip takes these versions for the tools that build the wheel, too.
ENV PIP_CONSTRAINT=/build/constraints.txt
RUN python3 -m venv /opt/mapstate \
    && /opt/mapstate/bin/python -m pip install --no-cache-dir ".[$EXTRAS]" \
    && python3 -m venv /opt/bill \
    && /opt/bill/bin/python -m pip install --no-cache-dir cyclonedx-bom \
    && /opt/bill/bin/cyclonedx-py environment --output-reproducible --output-file /opt/mapstate/sbom.json \
        /opt/mapstate/bin/python

FROM ${PYTHON}
COPY --from=build /opt/mapstate /opt/mapstate
ENV PATH=/opt/mapstate/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8080
HEALTHCHECK --interval=20s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# Any other command is one of mapstate's: docker run mapstate ls. A container that only runs one needs --no-healthcheck.
ENTRYPOINT ["mapstate"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080", "--token-env", "MAPSTATE_TOKEN"]
