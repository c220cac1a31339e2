"""Tell people what is wrong with tables: new, changed and resolved findings, by webhook, chat or e-mail."""
