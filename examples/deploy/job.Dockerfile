# A job's image, as examples/deploy/site.yaml runs it: docs/running.md#images.
#
#     docker build --tag site --file examples/deploy/job.Dockerfile .
#
# Spark is that of its own image, and Python another one: those images have 3.10, and mapstate needs 3.11.
ARG SPARK=spark:4.1.2-scala2.13-java17-ubuntu
ARG PYTHON=python:3.13-slim-bookworm

FROM ${SPARK} AS spark

FROM ${PYTHON} AS build
ARG EXTRAS=redis,sketches,tables
WORKDIR /build
COPY . .
ENV PIP_CONSTRAINT=/build/constraints.txt
RUN python3 -m venv /opt/site \
    && /opt/site/bin/python -m pip install --no-cache-dir ".[$EXTRAS]"

FROM ${PYTHON}
# What Spark's entrypoint calls.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless libnss-wrapper procps tini \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 185 --home-dir /nonexistent spark
COPY --from=spark /opt/spark /opt/spark
COPY --from=spark /opt/entrypoint.sh /opt/entrypoint.sh
COPY --from=build /opt/site /opt/site
COPY examples/site_job.py /opt/site/site_job.py
ENV PATH=/opt/site/bin:/opt/spark/bin:$PATH SPARK_HOME=/opt/spark PYSPARK_PYTHON=/opt/site/bin/python
WORKDIR /opt/spark/work-dir
USER 185
ENTRYPOINT ["/opt/entrypoint.sh"]
