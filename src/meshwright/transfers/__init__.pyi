from meshwright.transfers.connection import allow_puts as allow_puts
from meshwright.transfers.connection import connect as connect
from meshwright.transfers.links import Link as Link
from meshwright.transfers.routes import Route as Route
from meshwright.transfers.routes import route as route
