//! Makes a [`Config`] of a few flags, for `tidegate run --upstream` and for overriding a file's admin listener.

use std::{net::SocketAddr, path::Path};

use toml::Spanned;

use super::{
    Admin, Config, ConfigError, Secret,
    file::{FileConfig, FileLimit, FileRoute, FileUpstream},
    resolve::resolve,
    rules,
};

/// What `tidegate run --upstream` is told.
#[derive(Clone, Debug)]
pub struct QuickOptions {
    /// `--listen`
    pub listen: String,
    /// `--upstream`
    pub upstream: String,
    /// `--slots`
    pub slots: u32,
    /// `--store`
    pub store_url: Secret,
    /// `--admin-listen`; the default address if none.
    pub admin_listen: Option<AdminListen>,
}

/// `--admin-listen`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminListen {
    /// `none`: no admin listener.
    Off,
    /// An address and a port.
    At(SocketAddr),
}

impl std::str::FromStr for AdminListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::Off),
            address => {
                rules::address(address).map(Self::At).map_err(|rule| format!("{rule}, or none"))
            }
        }
    }
}

impl Config {
    /// Makes a configuration of one limit and one upstream, both named `default`, and one route to them.
    pub fn quick(options: QuickOptions) -> Result<Self, ConfigError> {
        let listen = rules::address(&options.listen).map_err(flag("--listen"))?;
        rules::endpoint(&options.upstream).map_err(flag("--upstream"))?;
        rules::within::<u32>(options.slots.into(), rules::SLOTS).map_err(flag("--slots"))?;
        let store = rules::store_kind(&options.store_url.0).map_err(flag("--store"))?;

        let mut file = one_of_each(options.upstream, options.slots);
        if options.admin_listen.is_some() {
            // The default's place is free then.
            file.admin.listen = Some(unplaced("127.0.0.1:0".to_owned()));
        }
        let mut config =
            resolve(file, 0, Path::new("")).map_err(|problem| flag("--upstream")(problem.rule))?;
        config.server.listen = listen;
        config.store.kind = store;
        let default = config.admin.as_ref().map(|admin| admin.listen);
        let admin_listen = options.admin_listen.or(default.map(AdminListen::At));
        config.with_admin_listen(admin_listen.unwrap_or(AdminListen::Off))
    }

    /// Puts the admin listener elsewhere than the file says.
    pub fn with_admin_listen(mut self, admin_listen: AdminListen) -> Result<Self, ConfigError> {
        let off_limits = match admin_listen {
            AdminListen::Off => None,
            AdminListen::At(listen) => Some(listen),
        };
        self.upstreams.iter_mut().for_each(|upstream| upstream.off_limits = off_limits);
        self.admin = match admin_listen {
            AdminListen::Off => None,
            AdminListen::At(listen) => {
                rules::apart(self.server.listen, listen).map_err(flag("--admin-listen"))?;
                for endpoint in self.upstreams.iter().flat_map(|upstream| &upstream.endpoints) {
                    rules::not_admin(endpoint, listen).map_err(flag("--admin-listen"))?;
                }
                Some(Admin { listen, token: self.admin.and_then(|admin| admin.token) })
            }
        };
        Ok(self)
    }
}

fn flag(flag: &'static str) -> impl Fn(String) -> ConfigError {
    move |rule| ConfigError::Flag { flag, rule }
}

/// The file that these flags stand for.
fn one_of_each(endpoint: String, slots: u32) -> FileConfig {
    let name = || unplaced("default".to_owned());
    let limit = FileLimit { slots: Some(unplaced(slots.into())), ..FileLimit::default() };
    let upstream = FileUpstream {
        endpoints: Some(unplaced(vec![unplaced(endpoint)])),
        limits: Some(vec![name()]),
        ..FileUpstream::default()
    };
    let route = FileRoute { upstream: Some(name()), ..FileRoute::default() };
    FileConfig {
        limits: [(name(), limit)].into(),
        upstreams: [(name(), upstream)].into(),
        routes: vec![unplaced(route)],
        ..FileConfig::default()
    }
}

fn unplaced<T>(value: T) -> Spanned<T> {
    Spanned::new(0..0, value)
}
