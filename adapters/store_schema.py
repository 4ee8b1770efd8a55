"""The tables of an `AdapterStore`."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS version (
    name TEXT NOT NULL, number INTEGER NOT NULL, base TEXT NOT NULL, digest TEXT NOT NULL, path TEXT NOT NULL,
    created_s INTEGER NOT NULL, PRIMARY KEY (name, number)
);
CREATE TABLE IF NOT EXISTS split (
    name TEXT NOT NULL, number INTEGER NOT NULL, percent INTEGER NOT NULL, PRIMARY KEY (name, number)
);
CREATE TABLE IF NOT EXISTS trial (name TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (name, number));
CREATE TABLE IF NOT EXISTS tried (name TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (name, number));
CREATE TABLE IF NOT EXISTS invocation (
    name TEXT NOT NULL, number INTEGER NOT NULL, token_ids TEXT NOT NULL, PRIMARY KEY (name, number)
);
CREATE TABLE IF NOT EXISTS head (
    name TEXT NOT NULL, number INTEGER NOT NULL, num_labels INTEGER NOT NULL, PRIMARY KEY (name, number)
);
CREATE TABLE IF NOT EXISTS revision (
    only INTEGER PRIMARY KEY CHECK (only = 0), value INTEGER NOT NULL, store TEXT NOT NULL
);
INSERT OR IGNORE INTO revision VALUES (0, 0, lower(hex(randomblob(16))));
CREATE TABLE IF NOT EXISTS last_removed (name TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS told (name TEXT PRIMARY KEY, digest TEXT NOT NULL, signature TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS build (only INTEGER PRIMARY KEY CHECK (only = 0), value TEXT NOT NULL);
"""
