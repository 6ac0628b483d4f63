"""What ``quartet simulate`` shows: tables, progress, and a report to pass on."""
