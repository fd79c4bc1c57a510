"""A fuzzer of jobs: random small jobs on real Spark, each held against plain Python.

    Row, COLUMNS     the rows of a job: keys of all types, with nulls               `rows`
    Rolling          rolling windows of a state, and what is right of them          `rolling`, `rolled`
    State, Habit     what a job keeps, and how its foreachBatch function calls it   `habits`
    Job, steps       what happens to it: files, runs, losses, restores, deaths      `steps`
    World            one job's directories, store and Spark queries; the check      `world`
    Advice           what an error tells an operator, done literally                `advice`
    random_job       a job from a seed                                              `generate`
    shortest         a failing job, reduced                                         `reduce`
    MUTANTS          guards of the library, each switched off                       `mutants`

``python -m fuzz`` runs it. docs/fuzz.md says what it tries and what it does not.
"""
