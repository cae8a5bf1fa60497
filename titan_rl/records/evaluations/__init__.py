"""Results of evaluations on suites: estimators, records, tables."""
