// A dashboard has the type that Grafana gives it: each name is known, each enumeration has one of its values.
import type { AnnotationQuery, Dashboard, DataQuery, FieldConfig, Panel, RowPanel } from "@grafana/schema";
import type {
  FieldConfig as Lines,
  Options,
} from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has the values of an enumeration as strings.
type Json<T> = T extends string
  ? `${T}`
  : T extends (infer I)[]
    ? Json<I>[]
    : T extends object
      ? { [K in keyof T]: Json<T[K]> }
      : T;
type Prometheus = DataQuery & { expr: string; legendFormat?: string; exemplar?: boolean };
type TimeSeries = Omit<Panel, "type" | "options" | "fieldConfig" | "targets"> & {
  type: "timeseries";
  targets: Prometheus[];
  options: Options;
  fieldConfig: { defaults: Omit<FieldConfig, "custom"> & { custom?: Lines }; overrides: [] };
};
type Annotation = Omit<AnnotationQuery, "target"> & { target: Prometheus; titleFormat?: string };
type Ours = Omit<Dashboard, "annotations" | "panels"> & {
  annotations: { list: Annotation[] };
  panels: (TimeSeries | RowPanel)[];
};

export const dashboard: Json<Ours> = DASHBOARD;
