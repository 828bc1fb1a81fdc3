"""Files for Prometheus and Grafana, which `moecast monitor` copies: scraping, alerts, dashboard."""

from pathlib import Path

FOLDER = Path(__file__).parent
SCRAPING, ALERTS, DASHBOARD = "prometheus.yml", "alerts.yml", "dashboard.json"
FILES = (SCRAPING, ALERTS, DASHBOARD)
